"""Workers that differ get a sentence on every worker, before a number is handed out."""

import re

import pytest

from distributary.errors import WorkerLostError

# Noticed in a meeting of all workers, after which they can go on: one job shows all of them.
_NOTICED_TOGETHER = {
    "operation": "the program of step.* psum .*differ.py:.* worker LAST .* mul ",
    "a_large_constant": "digest .* worker LAST .*digest ",
    "a_python_argument": r"worker 0 \(differ.py:\d+\) gives it 0.1 and worker LAST .* 0.2",
    "an_array_with_a_number": "argument 0 = .*0.1000.* worker LAST .*0.2000",
    "the_shape_of_an_argument": r"input float32\[3\].* worker LAST .*input float32\[4\]",
    "a_compiled_function": r"the program of twice: .* 1\.0 .* worker LAST .* 2\.0 ",
    "the_name_of_a_variable": "creation of variable 'one'.*; worker LAST .*variable 'other'",
    "a_variable_made_outside_of_the_scope": r"'plain', made outside of the scope, .*"
    r"\[0.0, 0.0, 0.0\].* worker LAST .*\[1.0, 1.0, 1.0\]",
    "an_assigned_value": r"assign of variable 'v': .*\[0.0, 0.0, 0.0\].* worker LAST .*\[1.0, 1",
    "reduce_and_gather": r"worker 0 at differ.py:\d+ with reduce; .*worker LAST .* with gather",
    "the_structure_of_values": r"gave PyTreeDef\(\[\*\]\) on worker 0 and PyTreeDef\({'a': \*}\)",
    "the_rows_of_a_dataset": "data in memory of a distributed dataset is not the same on all"
    " workers: worker LAST got another one",
    "the_first_of_a_list_of_batches": "data in memory .* worker LAST",
    "equal_text": "silence",  # its objects have other addresses in each process
    "another_dataset_first": "next step of a distributed dataset; worker LAST .* with reduce",
    "an_assignment_on_one_worker": "the program of <lambda>; worker LAST .* assign of variable 'v'",
    "copies_that_drift": "copies of variable 'w' .*: worker LAST holds other values than worker 0",
    "garbage": "silence",  # that a trace leaves is no difference
    "a_checkpoint_of_one_worker": "the program of <lambda>; worker LAST .* saving a checkpoint",
}
_NOTICED_BY_KERAS = {
    "the_activation_of_a_layer": "a step of net.fit: .* custom_jvp_call .* worker LAST .* tanh ",
    "the_learning_rate": '"learning_rate": 0.1.* worker LAST .*"learning_rate": 0.2',
    "a_batch": "batch of train_on_batch is not the same on all workers: worker LAST",
    "a_variable_made_outside_of_the_scope_and_assigned": "a step of net.fit.* 'plain', made"
    r" outside of the scope, .*\[9.0, 9.0, 9.0\].* worker LAST .*\[10.0",
    "validation": "no validation_data and worker LAST .* a validation_data",
    "fit_and_evaluate": r"with fit of net; worker LAST .* with evaluate of net",
    "an_assigned_learning_rate": "sgd/learning_rate': .*0.25' and worker LAST .*0.5'",
    "evaluation_in_a_callback_of_one_worker": "end of an epoch; worker LAST .* evaluate of net",
    "training_that_one_worker_ends": "a step of net.fit; worker LAST .* the end of (an )?epoch",
}
# One worker waits in a program that the other does not join: the job ends.
_ENDS_THE_JOB = {
    "a_skipped_step": "worker 0 .* last began the program of step .*differ.py:.*"
    " waits for all before the next step of a distributed dataset .*differ.py:",
    "a_variable_that_only_the_chief_reads": "worker 0 .* waits for all before reduce .*differ.py:.*"
    " last began the program of step",
}


@pytest.mark.parametrize(
    ("num_workers", "cases"),
    [
        (2, _NOTICED_TOGETHER),
        (2, _NOTICED_BY_KERAS),
        # Of three workers the last one differs.
        (3, {name: _NOTICED_TOGETHER[name] for name in list(_NOTICED_TOGETHER)[::5]}),
    ],
)
def test_differences_are_named_on_every_worker_who_can_then_go_on(
    num_workers, cases, job, tmp_path
):
    ended = job(num_workers).start_all("differ", tmp_path, *cases).wait()

    for one in ended:
        assert one.code == 0, one.output
        assert list(one.result) == list(cases)
        for name, text in cases.items():
            pattern = text.replace("LAST", str(num_workers - 1))
            assert re.search(pattern, one.result[name] or "silence"), (name, one.result[name])


@pytest.mark.parametrize("case", _ENDS_THE_JOB)
def test_a_difference_that_leaves_a_worker_alone_ends_the_job_with_what_both_do(
    case, job, tmp_path
):
    ended = job(2).start_all("differ", tmp_path, case).wait()

    for one in ended:
        assert one.code in (1, WorkerLostError.exit_code), one.output
        said = [line for line in one.output.splitlines() if line.startswith("distributary: ")]
        assert len(said) == 1, one.output
        assert "the workers do different things" in said[0]
        assert re.search(_ENDS_THE_JOB[case], said[0]), said[0]


def test_a_worker_that_ends_before_the_others_is_named(job, tmp_path):
    workers = job(2).start_all("differ", tmp_path, "a_step_after_the_others_have_ended")

    for one in workers.wait():
        assert one.code == WorkerLostError.exit_code, one.output
        assert f"worker 0 at {workers.addresses[0]} has ended after" in one.output
        assert "Let every worker make the same calls, as often" in one.output
        assert re.search(r"needs all of them\. worker 1 at \S+ .*differ\.py:\d+ in", one.output)
