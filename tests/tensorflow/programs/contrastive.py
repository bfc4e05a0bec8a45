"""A contrastive loss over the whole global batch, gathered from all replicas, as in SimCLR."""

import numpy as np

import distributary.compat.tensorflow as tf

LARGE_NUM, GLOBAL_BATCH, DIM = 1e9, 8, 6
random = np.random.default_rng(0)
views = random.normal(size=(32, 2, 10)).astype("float32")
views[:, 1] = views[:, 0] + 0.1 * views[:, 1]


def tpu_cross_replica_concat(tensor, strategy=None):
    """Reduce a concatenation of the `tensor` across replicas."""
    if strategy is None or strategy.num_replicas_in_sync <= 1:
        return tensor
    num_replicas = strategy.num_replicas_in_sync
    replica_context = tf.distribute.get_replica_context()
    with tf.name_scope("tpu_cross_replica_concat"):
        # This creates a tensor that is like the input tensor but has an added
        # replica dimension as the outermost dimension.
        ext_tensor = tf.scatter_nd(
            indices=[[replica_context.replica_id_in_sync_group]],
            updates=[tensor],
            shape=tf.concat([[num_replicas], tf.shape(tensor)], axis=0),
        )
        ext_tensor = replica_context.all_reduce(tf.distribute.ReduceOp.SUM, ext_tensor)
        # Flatten the replica dimension.
        return tf.reshape(ext_tensor, [-1] + list(ext_tensor.shape[2:]))


def add_contrastive_loss(hidden, temperature=0.5, strategy=None):
    hidden = tf.math.l2_normalize(hidden, -1)
    hidden1, hidden2 = tf.split(hidden, 2, 0)
    batch_size = tf.shape(hidden1)[0]
    if strategy is not None:
        hidden1_large = tpu_cross_replica_concat(hidden1, strategy)
        hidden2_large = tpu_cross_replica_concat(hidden2, strategy)
        enlarged_batch_size = tf.shape(hidden1_large)[0]
        replica_context = tf.distribute.get_replica_context()
        replica_id = tf.cast(tf.cast(replica_context.replica_id_in_sync_group, tf.uint32), tf.int32)
        labels_idx = tf.range(batch_size) + replica_id * batch_size
        labels = tf.one_hot(labels_idx, enlarged_batch_size * 2)
        masks = tf.one_hot(labels_idx, enlarged_batch_size)
    logits_aa = tf.matmul(hidden1, hidden1_large, transpose_b=True) / temperature
    logits_aa = logits_aa - masks * LARGE_NUM
    logits_bb = tf.matmul(hidden2, hidden2_large, transpose_b=True) / temperature
    logits_bb = logits_bb - masks * LARGE_NUM
    logits_ab = tf.matmul(hidden1, hidden2_large, transpose_b=True) / temperature
    logits_ba = tf.matmul(hidden2, hidden1_large, transpose_b=True) / temperature
    loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
    loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
    loss = tf.reduce_mean(loss_a + loss_b)
    return loss, logits_ab, labels


class LARSOptimizer:
    """Layer-wise adaptive rates, with a momentum of its own."""

    def __init__(self, learning_rate, variables, momentum=0.9):
        self.learning_rate, self.momentum = learning_rate, momentum
        self.slots = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]

    def apply(self, grads, variables):
        for grad, param, slot in zip(grads, variables, self.slots):
            w_norm = tf.norm(param, ord=2)
            g_norm = tf.norm(grad, ord=2)
            trust_ratio = tf.where(
                tf.greater(w_norm, 0),
                tf.where(tf.greater(g_norm, 0), (0.1 * w_norm / g_norm), 1.0),
                1.0,
            )
            next_v = tf.multiply(self.momentum, slot) + self.learning_rate * trust_ratio * grad
            slot.assign(next_v)
            param.assign(param - next_v)


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((10,)),
            tf.keras.layers.Dense(12, activation="relu"),
            tf.keras.layers.Dense(DIM, use_bias=False),
        ]
    )
    model.set_weights([random.normal(0, 0.4, w.shape) for w in model.get_weights()])
    optimizer = LARSOptimizer(0.5, model.trainable_variables)
    contrast_loss_metric = tf.keras.metrics.Mean("train/contrast_loss")
    contrast_acc_metric = tf.keras.metrics.Mean("train/contrast_acc")
    entropy_metric = tf.keras.metrics.Mean("train/contrast_entropy")


def single_step(features):
    with tf.GradientTape() as tape:
        features_list = tf.split(features, num_or_size_splits=2, axis=1)
        stacked = tf.concat([tf.squeeze(view, 1) for view in features_list], 0)
        outputs = model(stacked, training=True)
        con_loss, logits_con, labels_con = add_contrastive_loss(outputs, strategy=strategy)
        loss = con_loss / strategy.num_replicas_in_sync
    grads = tape.gradient(loss, model.trainable_variables)
    context = tf.distribute.get_replica_context()
    grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
    optimizer.apply(grads, model.trainable_variables)
    contrast_loss_metric.update_state(con_loss)
    width = tf.shape(logits_con)[1]
    contrast_acc_val = tf.equal(tf.argmax(labels_con[:, :width], 1), tf.argmax(logits_con, axis=1))
    contrast_acc_metric.update_state(tf.reduce_mean(tf.cast(contrast_acc_val, tf.float32)))
    prob_con = tf.nn.softmax(logits_con)
    entropy_con = -tf.reduce_mean(tf.reduce_sum(prob_con * tf.math.log(prob_con + 1e-8), -1))
    entropy_metric.update_state(entropy_con)


@tf.function
def train_multiple_steps(iterator):
    for _ in tf.range(2):
        images = next(iterator)
        strategy.run(single_step, (images,))


dataset = tf.data.Dataset.from_tensor_slices(views).repeat().batch(GLOBAL_BATCH)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
for loop in range(4):
    train_multiple_steps(iterator)
    for metric in (contrast_loss_metric, contrast_acc_metric, entropy_metric):
        print(metric.name, "%.4f" % metric.result().numpy())
        metric.reset_state()
