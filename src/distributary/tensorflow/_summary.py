"""`tf.summary`: the functions of one `Summaries`."""

from distributary.keras_bridge import Summaries, SummaryWriter as SummaryWriter

_summaries = Summaries()
audio = _summaries.audio
create_noop_writer = _summaries.create_noop_writer
create_file_writer = _summaries.create_file_writer
flush = _summaries.flush
get_step = _summaries.get_step
histogram = _summaries.histogram
image = _summaries.image
record_if = _summaries.record_if
scalar = _summaries.scalar
set_step = _summaries.set_step
should_record_summaries = _summaries.should_record_summaries
text = _summaries.text
