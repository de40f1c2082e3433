"""Data, callbacks and normalisation of the Keras face on real ranks: one table of checks for both back ends."""

import re

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
BUILT = (installed_build() or {}).get("frameworks", {})

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(not installed_build(), reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]

CHECKS = [
    "sync_batch_norm_and_a_rank_without_samples_equal_one_process",
    "class_and_sample_weights_equal_one_process",
    "shares_change_without_retracing",  # on the torch back end nothing is traced
    "every_sample_once_while_shares_change_and_tensorflow_reads_ahead",
    "broadcast_makes_ranks_alike",
    "a_balancer_that_was_forgotten_is_told",
    "other_variables_or_optimizers_are_told",
    "a_mistake_on_one_rank_is_an_error_on_all",
    "metrics_are_those_of_all_samples",
    "metrics_of_a_train_step_of_ones_own",
    "losses_of_several_outputs_are_those_of_all_samples",
    "a_loss_over_other_terms_equals_one_process",
    "the_learning_rate_is_scheduled_and_follows_the_batch",
    "the_factor_is_in_updates_alone",
    "elastic_states_and_a_trace_are_kept",
    "waiting_for_data_is_no_compute",
    "an_error_of_loading_reaches_every_rank",
    "the_rest_of_an_epoch_has_the_steps_that_are_left",
    "a_callback_of_one_rank_stops_all_after_the_same_batch",
    "a_callback_of_one_rank_stops_all_at_the_end_of_an_epoch",
    "samples_of_tf_data",
    "samples_of_streams_of_the_ranks_own",
]
TEXTS = "texts_come_as_keras_takes_them"  # each compiles a model of its own
FEW = [CHECKS[0], "metrics_are_those_of_all_samples"]


def run(ranks, back_end, worker, *arguments):
    assert back_end in BUILT, f"Horovod was built for {', '.join(BUILT)}: run `hvd-hetero build-horovod`"
    launched = horovodrun(ranks, worker, *arguments, timeout_s=500, KERAS_BACKEND=back_end, TF_CPP_MIN_LOG_LEVEL="3")
    assert launched.returncode == 0, launched.output[-6000:]
    return launched.output


@pytest.mark.parametrize("back_end", ["tensorflow", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("ranks", "checks"), [(2, CHECKS), pytest.param(3, FEW, marks=pytest.mark.slow)])
def test_the_checks_hold(back_end, ranks, checks):
    wanted = [check for check in checks if back_end == "tensorflow" or check != CHECKS[2]]
    output = run(ranks, back_end, "keras_data_worker.py", *wanted)
    assert re.findall(r"OK (\w+)", output) == wanted, output[-6000:]


def test_a_job_ends_whose_batches_were_being_read_when_a_rank_failed():
    """Each process would wait, at its end, for a batch that nobody reads any more."""
    launched = horovodrun(2, "keras_end_worker.py", "raises", timeout_s=60, KERAS_BACKEND="tensorflow", **QUIET)
    assert launched.returncode == 1 and "ValueError: a callback raised" in launched.output, launched.output[-6000:]
    assert "touched" not in launched.output


@pytest.mark.slow
def test_who_waits_for_a_sum_in_the_graph_says_for_whom():
    launched = horovodrun(
        2, "keras_end_worker.py", "late", timeout_s=150, KERAS_BACKEND="tensorflow", **QUIET,
        options=("--stall-check-warning-time-seconds", "1"),
    )  # fmt: skip
    assert "Exit code: 7" in launched.output, launched.output[-6000:]
    said = r'rank 0 \(.*\) has waited \d+ s for the others in "hvd_hetero\.balancer1\S+", at keras_end'
    assert re.search(said, launched.output), launched.output[-6000:]
    assert re.search(r"rank 1 .* has not come: it is at keras_end_worker.py:\d+ in end", launched.output)


def test_a_sum_in_the_graph_that_fails_is_explained_and_the_job_ends():
    """Nobody in Python waits for it, nor hears of its failure before `fit` raises, while others wait to deal."""
    launched = horovodrun(
        2, "keras_end_worker.py", "frozen", timeout_s=150, KERAS_BACKEND="tensorflow", HOROVOD_GLOO_TIMEOUT_SECONDS="4",
        **QUIET,
    )  # fmt: skip
    assert launched.returncode == 1, launched.output[-6000:]
    told = r'"hvd_hetero\.balancer1\S+" failed: rank 1 \(host \S+, process \d+\) does not answer: its process is'
    assert re.search(f"{told} stopped", launched.output), launched.output[-6000:]


@pytest.mark.slow
def test_texts_come_as_keras_takes_them():
    assert f"OK {TEXTS}" in run(2, "tensorflow", "keras_data_worker.py", TEXTS)


@pytest.mark.parametrize("back_end", ["tensorflow", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_digits_example_is_good_and_says_so_alike_on_both_ranks(back_end):
    output = run(2, back_end, "../../examples/keras_digits.py", "--shares", "96", "32")
    found = re.findall(r"rank (\d): test accuracy (0\.\d+)", output)
    assert sorted(rank for rank, _ in found) == ["0", "1"] and len({accuracy for _, accuracy in found}) == 1, output
    assert float(found[0][1]) >= 0.97


@pytest.mark.slow
def test_the_mixed_precision_example_learns():
    output = run(2, "tensorflow", "../../examples/keras_mixed_precision.py")
    found = re.findall(r"rank \d: test accuracy (0\.\d+)", output)
    assert len(found) == 2 and len(set(found)) == 1 and float(found[0]) >= 0.9
