"""For all tests."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.command_line import path_restored

# Test processes share the cores. PyTorch or a BLAS that took all of them would wait for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def secrets_of_tests(tmp_path_factory):
    """Secrets of runs are kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def modules_of_tests():
    """A test that calls the command line leaves the path as it was."""
    with path_restored():
        yield


ENGINES_AGREE = {"TestFedSparse", "TestPvi"}
"""Methods of each kind of message, state and server step, whose engines are compared by default."""
VARIANTS = {
    *(
        "TestScaffoldAtTheServersWeights",
        "TestScaffoldBound",
        "TestLaplaceVotes",
        "TestMixtureAdam",
    ),
    *("TestLaplaceSign", "TestFedSparseConvolutional", "TestScaffoldFedSparseBound"),
    *("TestFedSparseLogits", "TestFedSparseWeights", "TestScaffoldFedSparseWeights"),
    *("TestFedDropConvolutional", "TestVirtualSideBySide", "TestVirtualWithoutClientNetworks"),
    *("TestPviOneByOne", "TestFedLapWithoutCovariances", "TestFedGviBeta", "TestIvonAdmmOfMeans"),
    *("TestGpiFnmAlternating", "TestFedFuseOfRates", "TestFedPaLangevin", "TestFedBeDistilled"),
    *("TestReptile", "TestFedAvgM", "TestFedYogi", "TestPfnm", "TestFedEP", "TestHierarchicalFull"),
    *("TestFedNova", "TestQFedAvg", "TestMoon", "TestApfl", "TestPFedMe", "TestPerFedAvg"),
    *("TestFedPer", "TestFedRep", "TestFedBN", "TestFald", "TestFedIvon", "TestFens"),
    *("TestFedLpa", "TestPredBayes", "TestPredBayesDistilled", "TestQlsd", "TestDsvgd"),
    "TestDsvgdOfFewWeights",
    *("TestFedGvi", "TestFedPa", "TestFedBe", "TestFedAdam", "TestGrowing", "TestControlled"),
}
"""Contracts of methods under other settings, or that share their code with another."""
KIN = {
    *("fedprox", "reptile", "fedavgm", "fedyogi", "fedep", "fedpa", "pfnm", "scaffold-fedsparse"),
    *("fednova", "qfedavg", "moon", "apfl", "pfedme", "perfedavg", "fedper", "fedrep", "fedbn"),
    *("fald", "fedivon", "fens", "fedlpa", "predbayes", "qlsd", "dsvgd", "gaussian-head"),
}
"""Methods that share their code with others: tests of all methods try them when asked."""
LONG = {
    "test_every_method_takes_every_likelihood": (
        r"quantile|multilabel|cox|poisson|bernoulli|student|fedfuse|combined"
    ),
    "test_pages_can_be_read_at_any_width": r"^ten|^hundred|^regression|^wards|^gone|^surv|-dark",
    "test_on_paper": r"",
    "test_workers_end_with_the_run": r"",
    "test_a_killed_run_goes_on_where_private_states_are_said_to_be": r"workers",
    "test_a_run_on_this_machine_has_the_bits_of_the_sequential_engine": r"",
    "test_copies_with_their_units_in_other_orders_give_the_network_again": r"",
    "test_networks_that_share_nothing_are_their_ensemble_by_class_share": r"",
    "test_mnist": r"",
    "test_what_goes_out_learns_the_ensemble": r"",
    "test_one_liar_of_ten_costs_little_by_default": r"",
    "test_only_the_rest_is_sent_and_saved_and_the_whole_comes_back": r"fedfuse|fedgvi|combined",
    "test_a_rule_takes_the_middle_of_every_part": r"trimmed-mean|krum",
    "test_a_key_that_was_admitted_for_one_client_is_no_other": r"",
    "test_a_client_keeps_the_key_that_it_came_with_first_also_after_a_resume": r"",
    "test_what_lies_in_the_current_directory_is_not_run_unasked": r"",
    "test_a_body_that_goes_on_may_take_its_time": r"",
    "test_ivon_finds_the_posterior_of_the_pooled_rows": r"",
    "test_every_client_is_heard_of_on_every_engine": r"",
    "test_a_request_that_does_not_end_is_ended": r"[2-9]|1\d",
    "test_interruption_says_how_to_go_on": r"1",
    "test_a_signal_leaves_no_rows_behind": r"[1-9]",
    "test_a_table_trains_from_the_command_line": r"virtual",
    "test_a_program_runs_without_the_package_and_standardizes_by_itself": r"",
    "test_a_program_says_what_it_takes_and_rejects_images_that_are_standardized": r"",
    "test_robust_errors_of_hazards_are_the_infinitesimal_jackknife": r"",
    "test_the_same_from_the_command_line_over_flower_and_in_secret": r"",
    "test_two_jobs_give_the_numbers_of_one": r"",
    "test_threads_are_given_back": r"",
    "test_robust_rules_withstand_what_ruins_the_mean": r"",
    "test_all_kinds_of_rounds_add_up": r"",
    "test_a_sampled_round_is_the_integral_of_its_densities": r"",
    "test_with_precisions_that_stay_it_is_federated_admm": r"",
    "test_single_step_em_climbs_the_marginal_likelihood": r"",
    "test_langevin_moments_come_near_the_pooled_posterior": r"",
    "test_the_conjugate_fixed_point_stays_and_another_point_does_not": r"",
    "test_who_is_not_there_for_the_keys_is_lost_and_its_node_named": r"",
    "test_networks_in_other_orders_match_back_to_the_network": r"u-net|transformer|decoder|odd|-3",
    "test_all_units_of_all_clients_are_the_teacher": r"u-net|transformer|decoder|resnet",
    "test_single_figures": r"^svg",
    "test_a_huge_report_counts_as_if_its_client_had_not_been_there": r"virtual|mixture",
    "test_a_median_holds_where_the_mean_does_not": r"virtual",
    "test_your_own_module_in_the_current_folder": r"workers",
    "test_drawn_targets_give_the_precision_on_average": r"",
    "test_mnist_among_many_clients": r"",
    "test_a_dead_worker_is_replaced_and_nothing_changes": r"",
    "test_a_data_frame_is_as_its_file": r"",
    "test_a_network_in_memory_is_asked_for_again": r"",
    "test_workers_read_the_copy_of_a_data_frame": r"",
    "test_regression_in_the_unit_of_the_target": r"",
    "test_what_is_kept_changes_no_weight": r"",
    "test_blocks_and_single_channels_of_other_widths": r"",
    "test_runs_of_several_seeds_may_have_more_rounds": r"",
    "test_every_method_keeps_its_promises_on_a_regression": r"fedfuse|combined|fedgvi|fedbe|fedl1",
    "test_runs_and_their_compact_export": r"",
    "test_programs_and_weights_of_every_network": r"",
    "test_private_states_are_looked_for_where_they_are": r"scaffold",
    "test_exported_programs_answer_in_the_unit_of_the_target": r"",
    "test_files_are_evaluated_by_their_own_likelihood": r"",
    "test_ctrl_c_ends_it": r"",
    "test_a_bug_comes_back_with_its_trace": r"",
}
"""Tests, or those of their parameters that match, that take long for what they test."""


def _is_long(item):
    kind = getattr(item.cls, "__name__", "")
    if kind in VARIANTS or (item.name == "test_engines_agree" and kind not in {"", *ENGINES_AGREE}):
        return item.name != "test_reports_are_what_is_declared"
    call = getattr(item, "callspec", None)
    if call is not None and any(isinstance(v, str) and v in KIN for v in call.params.values()):
        return True
    pattern = LONG.get(item.originalname)
    return pattern is not None and bool(re.search(pattern, call.id if call else ""))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of the real data are skipped where these are not; long ones are among the slow."""
    for item in items:
        if isinstance(item, pytest.Function) and _is_long(item):
            item.add_marker(pytest.mark.slow)
    place = os.environ.get("FEDBAYES_DATA")
    if place and Path(place).is_dir():
        return
    absent = pytest.mark.skip(reason="FEDBAYES_DATA names no folder with real data")
    for item in items:
        if item.get_closest_marker("data"):
            item.add_marker(absent)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests that look at pages; without one they are skipped."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no chromium with chromedriver here (Debian: chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()
