"""Images and labels in record files: written, parsed, augmented, read by a strategy."""

import numpy as np

import distributary.compat.tensorflow as tf

random = np.random.default_rng(0)
images = random.integers(0, 255, (24, 8, 6, 3)).astype(np.uint8)
labels = random.integers(0, 3, 24)


def _bytes_feature(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _int64_feature(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def serialize_example(image, label):
    feature = {
        "image": _bytes_feature(image.tobytes()),
        "height": _int64_feature(image.shape[0]),
        "class": _int64_feature(int(label)),
        "box": tf.train.Feature(float_list=tf.train.FloatList(value=[0.1, 0.2, 0.3, 0.4])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


for shard in range(3):
    with tf.io.TFRecordWriter("images-%d.tfrec" % shard) as writer:
        for i in range(shard, 24, 3):
            writer.write(serialize_example(images[i], labels[i]))

feature_description = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "class": tf.io.FixedLenFeature([], tf.int64),
    "box": tf.io.FixedLenFeature([4], tf.float32),
    "missing": tf.io.FixedLenFeature([], tf.int64, default_value=7),
}


def read_tfrecord(record):
    example = tf.io.parse_single_example(record, feature_description)
    image = tf.io.decode_raw(example["image"], tf.uint8)
    image = tf.reshape(image, [8, 6, 3])
    image = tf.image.convert_image_dtype(image, tf.float32)
    return image, example["class"], example["box"]


def augment(image, label, box):
    image = tf.image.flip_left_right(image)
    image = tf.image.resize(image, [4, 3])
    return image, tf.one_hot(label, 3), box


filenames = sorted(tf.io.gfile.glob("images-*.tfrec"))
print([name.split("/")[-1] for name in filenames])
files = tf.data.Dataset.from_tensor_slices(filenames)
dataset = files.interleave(
    tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=tf.data.AUTOTUNE
)
dataset = dataset.map(read_tfrecord, num_parallel_calls=tf.data.AUTOTUNE)
first = next(iter(dataset))
print("%.4f" % float(tf.reduce_mean(first[0])), int(first[1]), first[2].numpy().round(1).tolist())
dataset = dataset.map(augment).cache().batch(8).prefetch(tf.data.AUTOTUNE)

strategy = tf.distribute.MirroredStrategy()


@tf.function
def statistics(image, label, box):
    def step(image, label, box):
        weights = tf.cast(tf.argmax(label, axis=-1), tf.float32) + 1.0
        return tf.reduce_sum(tf.reduce_mean(image, axis=[1, 2, 3]) * weights + box[:, 3])

    per_replica = strategy.run(step, args=(image, label, box))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)


for batch in strategy.experimental_distribute_dataset(dataset):
    print("%.4f" % statistics(*batch))
