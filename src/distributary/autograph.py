"""What you say of functions whose Python control flow becomes that of JAX, as in `tf.autograph`."""

from distributary.tensorflow.autograph import do_not_convert, set_loop_options

__all__ = ["do_not_convert", "set_loop_options"]
