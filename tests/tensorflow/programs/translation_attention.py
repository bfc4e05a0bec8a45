"""A recurrent translator with attention, forced by its teacher, as in TensorFlow's tutorial."""

import os

import numpy as np

import distributary.compat.tensorflow as tf

VOCAB, EMBEDDING, UNITS, BATCH_SIZE, START = 12, 5, 6, 8, 1
random = np.random.default_rng(0)
source = random.integers(2, VOCAB, (24, 5)).astype("int32")
target = np.concatenate([np.full((24, 1), START), source[:, ::-1]], axis=1).astype("int32")
target[::3, 4:] = 0


class Encoder(tf.keras.Model):
    def __init__(self, vocab_size, embedding_dim, enc_units):
        super().__init__()
        self.enc_units = enc_units
        self.embedding = tf.keras.layers.Embedding(vocab_size, embedding_dim)
        self.gru = tf.keras.layers.GRU(self.enc_units, return_sequences=True, return_state=True)

    def call(self, x, hidden):
        x = self.embedding(x)
        output, state = self.gru(x, initial_state=hidden)
        return output, state

    def initialize_hidden_state(self, batch):
        return tf.zeros((batch, self.enc_units))


class BahdanauAttention(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.W1 = tf.keras.layers.Dense(units)
        self.W2 = tf.keras.layers.Dense(units)
        self.V = tf.keras.layers.Dense(1)

    def call(self, query, values):
        query_with_time_axis = tf.expand_dims(query, 1)
        score = self.V(tf.nn.tanh(self.W1(query_with_time_axis) + self.W2(values)))
        attention_weights = tf.nn.softmax(score, axis=1)
        context_vector = attention_weights * values
        context_vector = tf.reduce_sum(context_vector, axis=1)
        return context_vector, attention_weights


class Decoder(tf.keras.Model):
    def __init__(self, vocab_size, embedding_dim, dec_units):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(vocab_size, embedding_dim)
        self.gru = tf.keras.layers.GRU(dec_units, return_sequences=True, return_state=True)
        self.fc = tf.keras.layers.Dense(vocab_size)
        self.attention = BahdanauAttention(dec_units)

    def call(self, x, hidden, enc_output):
        context_vector, attention_weights = self.attention(hidden, enc_output)
        x = self.embedding(x)
        x = tf.concat([tf.expand_dims(context_vector, 1), x], axis=-1)
        output, state = self.gru(x)
        output = tf.reshape(output, (-1, output.shape[2]))
        x = self.fc(output)
        return x, state, attention_weights


strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    encoder = Encoder(VOCAB, EMBEDDING, UNITS)
    decoder = Decoder(VOCAB, EMBEDDING, UNITS)
    sample_output, sample_hidden = encoder(source[:2], encoder.initialize_hidden_state(2))
    sample_decoded, _, _ = decoder(tf.zeros((2, 1), tf.int32), sample_hidden, sample_output)
    print("shapes", sample_output.shape, sample_decoded.shape)
    for part in (encoder, decoder):
        part.set_weights([random.normal(0, 0.3, w.shape) for w in part.get_weights()])
    optimizer = tf.keras.optimizers.Adam()
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def loss_function(real, pred):
    mask = tf.math.logical_not(tf.math.equal(real, 0))
    loss_ = loss_object(real, pred)
    mask = tf.cast(mask, dtype=loss_.dtype)
    loss_ *= mask
    return tf.nn.compute_average_loss(loss_, global_batch_size=BATCH_SIZE)


def replica_step(inp, targ):
    loss = 0
    batch = inp.shape[0]
    with tf.GradientTape() as tape:
        enc_output, enc_hidden = encoder(inp, encoder.initialize_hidden_state(batch))
        dec_hidden = enc_hidden
        dec_input = tf.expand_dims([START] * batch, 1)
        for t in range(1, targ.shape[1]):
            predictions, dec_hidden, _ = decoder(dec_input, dec_hidden, enc_output)
            loss += loss_function(targ[:, t], predictions)
            dec_input = tf.expand_dims(targ[:, t], 1)
    batch_loss = loss / int(targ.shape[1])
    variables = encoder.trainable_variables + decoder.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))
    return batch_loss


@tf.function
def train_step(inp, targ):
    losses = strategy.run(replica_step, args=(inp, targ))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


checkpoint_dir = "./training_checkpoints"
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")
checkpoint = tf.train.Checkpoint(optimizer=optimizer, encoder=encoder, decoder=decoder)
dataset = tf.data.Dataset.from_tensor_slices((source, target))
dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)
distributed = strategy.experimental_distribute_dataset(dataset)
steps_per_epoch = len(source) // BATCH_SIZE
for epoch in range(4):
    total_loss = 0
    for batch, (inp, targ) in enumerate(distributed):
        total_loss += train_step(inp, targ)
        if batch % 2 == 0:
            print(f"Epoch {epoch + 1} Batch {batch} Loss {total_loss.numpy():.4f}")
    if (epoch + 1) % 2 == 0:
        checkpoint.save(file_prefix=checkpoint_prefix)
    print(f"Epoch {epoch + 1} Loss {total_loss / steps_per_epoch:.4f}")


def evaluate(sentence, max_length):
    attention_plot = np.zeros((max_length, sentence.shape[1]))
    result = []
    enc_out, enc_hidden = encoder(tf.convert_to_tensor(sentence), tf.zeros((1, UNITS)))
    dec_hidden = enc_hidden
    dec_input = tf.expand_dims([START], 0)
    for t in range(max_length):
        predictions, dec_hidden, attention_weights = decoder(dec_input, dec_hidden, enc_out)
        attention_weights = tf.reshape(attention_weights, (-1,))
        attention_plot[t] = attention_weights.numpy()
        predicted_id = tf.argmax(predictions[0]).numpy()
        result.append(int(predicted_id))
        if predicted_id == 0:
            break
        dec_input = tf.expand_dims([predicted_id], 0)
    return result, attention_plot


for part in (encoder, decoder):
    part.set_weights([0 * w for w in part.get_weights()])
checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir))
result, plot = evaluate(source[:1], 6)
print("result", result, "attention %.4f" % (plot**2).sum())
