"""Keras on real Horovod, both back ends from one table, under the real `horovodrun`: few launches, many checks in each.

A back end that is not there is an error: `ci/environment` installs both, and HVD_HETERO_BACKENDS asks for fewer.
"""

import os
import re

import pytest
from launch import horovodrun

from hvd_hetero.engine.build import installed_build

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(installed_build() is None, reason="no Horovod installed: run `hvd-hetero build-horovod`"),
]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
BACKENDS = os.environ.get("HVD_HETERO_BACKENDS", "tensorflow,torch").split(",")
START, END = map(int, os.environ.get("HVD_HETERO_SEEDS", "0:6").split(":"))

LAW_2 = [
    "law_2:sgd,float64,1e-11",
    "law_2:embedding,float64,1e-11",
    "law_2:clipping_average_and_schedule,float64,1e-11",
    "law_2:accumulation,float64,1e-11",
    "law_2:weights_and_short_last_batch,float32,1e-5",
]
CHECKS = [
    "functions",
    "operations_without_a_name_leave_nothing_behind",
    "reductions_as_horovod_has_them",
    *LAW_2,
    "law_1",
    "another_optimizer",
    "nothing_of_a_rank_without_samples",
    "overflow_on_one_rank",
    "layers_that_a_batch_leaves_out",
    "half_precision_types",
    "codecs_and_topology",
    "saved_and_loaded",
    "plans_follow_speed",
    "other_parameters_are_found",
    "errors_say_what_to_do",
]
# What one back end alone has: several ways to run a step, a tape, and XLA.
OF_TENSORFLOW = [
    "law_2:many_steps_per_execution,float64,1e-11",
    "batches_of_any_size",
    "the_host_comes_between_updates",
    "buckets_leave_while_others_are_computed:graph",
    "buckets_leave_while_others_are_computed:host",
    "plain_sums_stay_in_the_graph",
    "constant_gradients_are_exchanged_in_each_step:graph",
    "constant_gradients_are_exchanged_in_each_step:host",
    "gradient_tape",  # rebuilds what is left of the others, too
    "variables_broadcast_in_a_function",
    "compiled_by_xla",
]
# Several exchanges in a batch.
REPEATED = ["another_optimizer_in_a_batch", "an_optimizer_applied_twice_in_a_batch",
            "what_codecs_keep_back_is_of_its_variables", "what_one_rank_keeps_back_goes_on_without_the_others",
            "what_is_kept_back_of_a_scaled_loss_goes_to_no_other"]
ON_THREE = ["law_2:adam,float64,1e-11", "law_2:weights_and_short_last_batch,float32,1e-5",
            "nothing_of_a_rank_without_samples"]
LOCAL = [
    "merging_every_step_is_synchronous_training:sgd,float64,1e-11",
    "merging_every_step_is_synchronous_training:scaled_loss_and_accumulation,float64,1e-11",
    "batches_of_an_update_count_by_their_shares",
    "parts_of_updates_are_those_of_their_rates",
    "fits_end_with_the_averages_of_all_ranks:2",
    "fit_ends_with_one_model",
    "ranks_meet_elsewhere",
    "nobody_waits_for_a_rank_that_stops",
    "back_to_synchronous_steps",
    "a_checkpoint_has_what_merges_keep",
    "a_model_compiled_anew_goes_on",
    "a_checkpoint_has_averages_and_what_statistics_weigh",
    "going_back_ends_what_is_under_way",
    "statistics_are_those_of_all_samples",
    "second_moments_are_those_of_synchronous_training",
    "a_rank_gets_over_what_was_not_finite",
    "local_errors_say_what_to_do",
    "others_hear_of_a_rank_that_fails",
]
LOCAL_OF_TENSORFLOW = ["merging_every_step_is_synchronous_training:many_steps_per_execution,float64,1e-11"]
# What a back end has beside all that with `--slow`.
MORE_LAWS = {
    "tensorflow": ["passes_of_horovod", "law_2:adam,float32,1e-5"],
    "torch": ["compiled_by_dynamo", "law_2:adam,float32,1e-5", *REPEATED],
}
MORE_LOCAL = {
    "tensorflow": [
        "merging_every_step_is_synchronous_training:accumulation,float64,1e-11",
        "merging_every_step_is_synchronous_training:averages_of_weights,float64,1e-11",
        "merging_every_step_is_synchronous_training:eager,float64,1e-11",
        "merging_every_step_is_synchronous_training:scaled_loss,float64,1e-11",
        "fits_end_with_the_averages_of_all_ranks:0,1,3",
    ],
    "torch": [
        "merging_every_step_is_synchronous_training:scaled_loss,float64,1e-11",
        "fits_end_with_the_averages_of_all_ranks:1",
    ],
}


def run_checks(backend, ranks, checks, worker="keras_law_worker.py", **environment):
    launched = horovodrun(ranks, worker, *checks, timeout_s=400, KERAS_BACKEND=backend, **QUIET, **environment)
    passed = re.findall(r"OK (\S+)", launched.output)
    assert launched.returncode == 0 and passed == checks, launched.output[-6000:]


def test_the_tensorflow_engine_keeps_the_contract():
    launched = horovodrun(
        3, "keras_engine_worker.py", HOROVOD_DYNAMIC_PROCESS_SETS="1", KERAS_BACKEND="tensorflow",
        TF_NUM_INTEROP_THREADS="1", **QUIET | {"TF_ENABLE_ONEDNN_OPTS": "1"},
    )  # fmt: skip
    passed = re.findall(r"OK contract", launched.output)
    assert launched.returncode == 0 and len(passed) == 3, launched.output[-6000:]


# Each launch costs a minute. The torch back end differs in what is around the exchange: a few checks always show that.
FIRST = ["functions", "reductions_as_horovod_has_them", "passes_of_horovod", "law_2:sgd,float32,1e-5",
         "law_2:embedding,float64,1e-11", "law_1", "overflow_on_one_rank", "layers_that_a_batch_leaves_out",
         "other_parameters_are_found"]


def marked(backend):
    """The back end, in whose place the other one's tests stand for the whole table unless `--slow` asks for both."""
    return pytest.param(backend, marks=pytest.mark.slow) if backend != BACKENDS[0] else backend


@pytest.mark.parametrize("backend", [marked(backend) for backend in BACKENDS])
def test_laws_on_two_ranks(backend):
    tapes = ["tapes_of_one_batch", "tapes_of_twins"]
    checks = CHECKS + REPEATED + ([*OF_TENSORFLOW, *tapes] if backend == "tensorflow" else [])
    run_checks(backend, 2, checks, "keras_repeat_worker.py")


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_first_laws_on_the_other_back_end(backend):
    run_checks(backend, 2, FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_laws_on_two_ranks(backend):
    run_checks(backend, 2, MORE_LAWS[backend], "keras_repeat_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if MORE_LOCAL[backend]])
def test_more_of_local_sgd_on_two_ranks(backend):
    run_checks(backend, 2, MORE_LOCAL[backend], "keras_local_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_laws_on_three_ranks(backend):
    run_checks(backend, 3, ON_THREE + (["law_2:eager,float64,1e-11"] if backend == "tensorflow" else []))


@pytest.mark.parametrize("backend", [marked(backend) for backend in BACKENDS])
def test_local_sgd_on_two_ranks(backend):
    run_checks(backend, 2, LOCAL + (LOCAL_OF_TENSORFLOW if backend == "tensorflow" else []), "keras_local_worker.py")


@pytest.mark.parametrize("start", range(START, END, 6))
@pytest.mark.parametrize("backend", [marked(backend) for backend in BACKENDS])
def test_scripts_drawn_at_random(backend, start):
    """HVD_HETERO_SEEDS=6:240 draws more than those of every run. With one thread graphs are put in order."""
    checks = [f"drawn_scripts:{start},{min(start + 6, END)}"]
    run_checks(backend, 2 + start // 6 % 2, checks, "keras_random_worker.py", TF_NUM_INTEROP_THREADS="1")
