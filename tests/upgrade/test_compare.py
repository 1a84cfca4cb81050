"""Old against new: each kind of regression, injected into the new version's record, is red and named."""

import copy
import re

import pytest

from harness.upgrade.compare import compare, compare_records
from harness.verdict import Verdict
from tests.upgrade.records import FINDING, case, judged, measured, record

SPEC = "small-vllm-v1-spec"


@pytest.fixture
def sides(old, new):
    """The two cases, to be broken in place."""
    return case(old), case(new)


def red(judgement, code, verdict=Verdict.FAIL):
    """Return the only finding with this code that is not PASS."""
    assert judgement.verdict is verdict, judgement.as_text()
    (found,) = [each for each in judgement.findings if each.code == code and each.verdict is not Verdict.PASS]
    assert found.verdict is verdict
    if verdict is Verdict.FAIL:
        assert found.cause
        assert found.remedy
    return found


def changes(judgement, topic):
    return [(each["kind"], each["what"]) for each in judgement.measurements["changes"] if each["topic"] == topic]


def loads(of, role, rank=None):
    return [each for each in of["evidence"]["loads"] if each["role"] == role and rank in (None, each["place"]["rank"])]


def named(rows, name, key="name"):
    return next(row for row in rows if row[key] == name)


def surface(of):
    return measured(of, "startup")["servers"][SPEC]["surface"]


def test_the_same_record_twice(old):
    judgement = compare(case(old), case(copy.deepcopy(old)))
    assert {each.verdict for each in judgement.findings} == {Verdict.PASS}
    assert judgement.measurements["changes"] == []
    assert judgement.suite == "upgrade"


def test_an_upgrade_that_changes_nothing_but_packages(sides):
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    # What can change a result comes first, and the other packages are listed too.
    assert [what for _, what in changes(judgement, "packages")] == ["vllm", "torch", "requests"]
    assert {each["topic"] for each in judgement.measurements["changes"]} == {"packages"}


# --- what makes two cases incomparable


def put(*path, value="other"):
    def change(of):
        for name in path[:-1]:
            of = of[name]
        of[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (put("pair", "k", value=5), "pair.k"),
        (put("pair", "dtype", value="float32"), "pair.dtype"),
        (put("pair", "expect", "aux_layers", value=[1, 2, 3]), "pair.expect"),
        (put("pair", "workload", "max_tokens", value=9), "pair.workload"),
        (put("target", "digest"), "target.digest"),
        (put("drafter", "digest"), "drafter.digest"),
        (put("prompts", "digest"), "prompts.digest"),
        (put("engine", "engine", value="sglang"), "engine.engine"),
        (put("runner_asked", value="v2"), "runner_asked"),
        (put("device", value="cuda"), "device"),
        (put("machine", "cpu"), "machine.cpu"),
        (put("machine", "gpu"), "machine.gpu"),
    ],
)
def test_cases_that_are_not_comparable(sides, change, name):
    change(sides[1])
    assert name in red(compare(*sides), "UPG001", Verdict.INVALID).summary


def test_where_things_lie_and_how_much_memory_there_is_may_differ(sides):
    for change in (
        put("pair", "source"), put("target", "folder"), put("drafter", "folder"), put("machine", "memory_bytes"),
        put("pair", "workload", "prompts_file"), put("machine", "system"),
    ):  # fmt: skip
        change(sides[1])
    assert compare(*sides).verdict is Verdict.PASS


# --- keys, tensors, config


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("offered", "fate"), [(1, "dropped"), (0, "never offered")])
def test_a_key_that_is_newly_dropped(sides, rank, offered, fate):
    named(loads(sides[1], "drafter", rank)[0]["keys"], "norm").update(landed=[], offered=offered)
    judgement = compare(*sides)
    found = red(judgement, "UPG010")
    assert "norm" in found.summary
    assert fate in found.actual
    assert "torch 2.9.0 -> 2.10.0" in found.cause
    assert changes(judgement, "keys") == [("worse", "drafter: norm")]


def test_a_key_that_was_dropped_before_is_no_regression_and_one_that_lands_again_is_better(sides):
    for load in loads(sides[0], "drafter"):
        named(load["keys"], "norm")["landed"] = []
        named(load["keys"], "head")["landed"] = []
    for load in loads(sides[1], "drafter"):
        named(load["keys"], "norm")["landed"] = []
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "keys") == [("better", "drafter: head")]


def test_a_key_that_the_new_version_may_ignore(sides):
    for side, landed in zip(sides, (["head"], []), strict=True):
        for load in loads(side, "drafter"):
            load["keys"].append({**load["keys"][0], "name": "t2d", "landed": landed})
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "keys") == [("different", "drafter: t2d")]


def test_a_tensor_that_is_newly_not_filled(sides):
    named(loads(sides[1], "drafter", 1)[0]["parameters"], "norm.weight")["written"] = 0
    found = red(compare(*sides), "UPG011")
    assert "norm.weight" in found.summary
    assert "0 of 64" in found.actual


def test_a_new_tensor_that_nothing_fills(sides):
    for load in loads(sides[1], "drafter"):
        load["parameters"].append({**load["parameters"][0], "name": "fc2.weight", "written": 0, "keys": []})
    assert "fc2.weight" in red(compare(*sides), "UPG011").summary


def test_a_tensor_of_which_it_can_no_longer_be_told(sides):
    named(loads(sides[1], "target", 0)[0]["parameters"], "norm.weight")["exact"] = False
    assert "norm.weight" in red(compare(*sides), "UPG011", Verdict.INVALID).summary


def test_a_model_that_is_built_otherwise_is_listed(sides):
    for load in loads(sides[1], "target"):
        load["model_class"] = "Another"
        row = named(load["parameters"], "norm.weight")
        row["name"] = "final_norm.weight"
        named(load["keys"], "norm")["landed"] = ["final_norm.weight"]
        named(load["parameters"], "head")["shape"] = [8, 9]
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "tensors") == [
        ("different", "target: model class"),
        ("different", "target: tensors of the model"),
        ("different", "target: head"),
    ]


def test_a_rank_that_one_side_did_not_look_at(sides):
    sides[1]["evidence"]["loads"] = loads(sides[1], "target") + loads(sides[1], "drafter", 0)
    assert "load of the drafter on rank 1" in red(compare(*sides), "UPG002", Verdict.INVALID).summary


def test_a_config_key_that_matters_is_newly_ignored(sides):
    config = sides[1]["evidence"]["config"]
    named(config, "norm_before_residual", "path")["read"] = False
    sides[1]["evidence"]["absent"] = [{"path": "norm_before_residuals", "readers": []}]
    found = red(compare(*sides), "UPG012")
    assert "norm_before_residual = True" in found.actual
    assert "newly asks for norm_before_residuals in place of norm_before_residual" in found.cause


def test_a_setting_that_is_in_the_contracts_list_alone_matters_too(sides):
    for side in sides:
        side["evidence"]["config"].append({**side["evidence"]["config"][0], "path": "mlp_bias", "value": True})
    sides[1]["evidence"]["config"][-1]["read"] = False
    assert "mlp_bias" in red(compare(*sides), "UPG012").summary


def test_another_config_key_that_is_newly_ignored_is_listed(sides):
    named(sides[1]["evidence"]["config"], "hidden_size", "path")["read"] = False
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "config") == [("different", "hidden_size")]


# --- what reaches the drafter


def proposals(of, rank=0):
    return of["evidence"]["servings"][rank]["proposals"]


def feed(of, *layers, rank=0):
    for proposal in proposals(of, rank):
        for capture, chosen in zip(proposal["captures"], layers, strict=True):
            capture["layers"] = list(chosen)


@pytest.mark.parametrize(
    ("layers", "cause"),
    [
        ([(3,), (5,), (6,)], "each layer is +1"),
        ([(4,), (2,), (5,)], "another order"),
        ([(2,), (4,), (7,)], "falls back to its defaults"),
        ([(), (), ()], "altered on the way"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_shifted_layers(sides, layers, cause, rank):
    feed(sides[1], *layers, rank=rank)
    found = red(compare(*sides), "UPG021")
    assert found.expected == "[2, 4, 5]"
    if layers[0]:
        assert str([layer for (layer,) in layers]) in found.summary
    assert cause in found.cause
    assert f"rank {rank}" in found.source


def test_one_proposal_with_another_layer(sides):
    proposals(sides[1])[1]["captures"][0]["layers"] = [3]
    assert "no layer, layer 4, layer 5" in red(compare(*sides), "UPG021").summary


def test_layers_that_cannot_be_told_apart_are_not_shifted(sides):
    feed(sides[0], (1, 2), (4,), (5,))
    assert compare(*sides).verdict is Verdict.PASS


def test_a_state_after_the_final_norm(sides):
    for proposal in proposals(sides[1]):
        proposal["captures"][2].update(layers=[], final_norm=True)
    assert "after the final norm" in red(compare(*sides), "UPG021").summary


def test_layers_that_the_old_version_did_not_identify(sides):
    feed(sides[0], (2,), (), (5,))
    assert "slot 1" in red(compare(*sides), "UPG002", Verdict.INVALID).summary


def test_one_hidden_state_in_place_of_three(sides):
    for proposal in proposals(sides[1]):
        proposal.update(feature_width=256, projection_widths=[], captures=proposal["captures"][:1])
    judgement = compare(*sides)
    assert "width [256]" in red(judgement, "UPG020").summary
    assert "no slot" in red(judgement, "UPG021").summary


@pytest.mark.parametrize("layers", [[(3,), (5,), (6,)], [(2,), (), (5,)], [(2,)]])
def test_what_reaches_the_drafter_was_wrong_and_is_right(sides, layers):
    """The old release captured other layers, altered states, or one state alone; the new one feeds it as trained."""
    for proposal in proposals(sides[0]):
        proposal.update(feature_width=256 * len(layers), captures=proposal["captures"][: len(layers)])
    feed(sides[0], *layers)
    judged(sides[0], "aux_hidden", "AUX005", "FAIL")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert "better" in {kind for kind, _ in changes(judgement, "features")}
    judged(sides[1], "aux_hidden", "AUX005", "FAIL")
    assert compare(*sides).verdict in {Verdict.FAIL, Verdict.INVALID}, "still wrong, in another way"


def test_a_projection_that_was_not_seen(sides):
    for proposal in proposals(sides[1]):
        proposal.update(projection_widths=[], layers_entered=0)
    assert "what the projection is given on rank 0" in red(compare(*sides), "UPG002", Verdict.INVALID).summary


def test_a_projection_that_is_newly_bypassed(sides):
    proposals(sides[1])[0]["projection_widths"] = []
    assert "bypassed in 1 of 2" in red(compare(*sides), "UPG020").summary


def test_a_projection_that_is_no_longer_bypassed_is_better(sides):
    proposals(sides[0])[0]["projection_widths"] = []
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "features") == [("better", "rank 0: width")]


# --- acceptance and outputs


def accept(of, position, count):
    """Let every prompt accept a position, and those after it, so often only; the oracle says otherwise."""
    found = measured(of, "acceptance")
    for row in (*found["prompts"], found["totals"]):
        prompts = 1 if "name" in row else len(found["prompts"])
        row["per_position"][position:] = [count * prompts] * (4 - position)
        row["accepted"] = sum(row["per_position"])
    return found


POSITIONS = [(0, "what the target feeds the drafter"), (2, "positions before 2 are as expected")]


@pytest.mark.parametrize(("position", "cause"), POSITIONS)
def test_halved_acceptance_of_a_canary(sides, position, cause):
    accept(sides[1], position, 1)
    judged(sides[1], "acceptance", "ACC020", "FAIL")
    judgement = compare(*sides)
    assert cause in red(judgement, "UPG030").cause
    assert "acceptance was PASS" in red(judgement, "UPG070").summary


def test_the_position_is_found_although_there_are_more_steps(sides):
    """Fewer accepted tokens a step make more steps of the same output, so earlier positions count higher."""
    found = accept(sides[1], 2, 0)
    for row in (*found["prompts"], found["totals"]):
        row["drafts"] *= 2
        row["per_position"][:2] = [2 * count for count in row["per_position"][:2]]
        row["draft_tokens"] = 4 * row["drafts"]
        row["accepted"] = sum(row["per_position"])
    judged(sides[1], "acceptance", "ACC020", "FAIL")
    assert "positions before 2 are as expected" in red(compare(*sides), "UPG030").cause


def test_a_canary_cannot_equal_its_oracle_twice_with_other_counts(sides):
    accept(sides[1], 0, 1)
    assert compare(*sides).verdict is Verdict.INVALID


def test_a_canary_that_is_accepted_as_it_should_be_again(sides):
    accept(sides[0], 0, 1)
    judged(sides[0], "acceptance", "ACC020", "FAIL")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert [kind for kind, _ in changes(judgement, "acceptance")] == ["better"]


def natural(sides, dtype="bfloat16"):
    for side in sides:
        side["pair"].update(canary=None, dtype=dtype)


def test_the_acceptance_of_another_pair_is_listed_with_both_figures(sides):
    natural(sides)
    accept(sides[1], 0, 1)
    judgement = compare(*sides)
    (found,) = [each for each in judgement.findings if each.code == "UPG031"]
    assert found.verdict is Verdict.PASS
    assert "accept length 2.333, 5.000 before" in found.summary


def write(of, mode, prompt, tokens):
    named(measured(of, "losslessness")["comparisons"], prompt)["segments"][0][mode] = tokens


@pytest.mark.parametrize(("code", "mode"), [("UPG040", "spec"), ("UPG041", "plain")])
@pytest.mark.parametrize(("tokens", "actual"), [([5, 9, 7], "token 1: 9"), ([5, 6], "token 2: 2 tokens")])
def test_a_changed_output_of_a_canary(sides, code, mode, tokens, actual):
    write(sides[1], mode, "p01", tokens)
    found = red(compare(*sides), code)
    assert "the first at prompt 'p01'" in found.summary
    assert actual in found.actual


@pytest.mark.parametrize("mode", ["spec", "plain"])
def test_an_output_of_a_canary_that_was_wrong_and_is_right(sides, mode):
    write(sides[0], mode, "p01", [5, 9, 7])
    judged(sides[0], "losslessness", "LOS010", "FAIL")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert [kind for kind, _ in changes(judgement, "outputs")] == ["better"]
    judged(sides[1], "losslessness", "LOS010", "FAIL")
    red(compare(*sides), "UPG040" if mode == "spec" else "UPG041")


def test_the_cause_of_a_changed_output(sides):
    write(sides[1], "spec", "p01", [5, 9, 7])
    assert "verification or sampling" in red(compare(*sides), "UPG040").cause
    write(sides[1], "plain", "p01", [5, 9, 7])
    assert "the target itself" in red(compare(*sides), "UPG040").cause


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_changed_output_of_another_pair_is_listed_unless_speculation_broke_it(sides, dtype):
    natural(sides, dtype)
    for mode in ("spec", "plain"):
        write(sides[1], mode, "p01", [5, 9, 7])
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert [kind for kind, _ in changes(judgement, "outputs")] == ["different", "different"]
    judged(sides[1], "losslessness", "LOS006", "FAIL")
    assert "p01" in red(compare(*sides), "UPG040").summary


# --- what dashboards and launch scripts use


def test_a_metric_that_was_renamed(sides):
    metrics = surface(sides[1])["metrics"]
    metrics["vllm:spec_decode_drafts_total"] = metrics.pop("vllm:spec_decode_num_drafts_total")
    found = red(compare(*sides), "UPG050")
    assert "vllm:spec_decode_num_drafts_total" in found.summary
    assert "vllm:spec_decode_drafts_total" in found.actual


@pytest.mark.parametrize("change", [{"type": "gauge"}, {"labels": []}])
def test_a_metric_that_changed_meaning(sides, change):
    surface(sides[1])["metrics"]["vllm:spec_decode_num_drafts_total"].update(change)
    assert "changed meaning: vllm:spec_decode_num_drafts_total" in red(compare(*sides), "UPG050").summary


def test_other_metrics_that_vanish_or_come_are_listed(sides):
    metrics = surface(sides[1])["metrics"]
    metrics["vllm:requests_running"] = metrics.pop("vllm:num_requests_running")
    metrics["vllm:spec_decode_num_drafts_total"]["help"] = "Drafts, as they are now."
    metrics["vllm:spec_decode_num_drafts_total"]["labels"].append("rank")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "surface") == [
        ("different", "metric: vllm:num_requests_running"),
        ("different", "metric: 1 new"),
        ("different", "labels that went and came, of metric vllm:spec_decode_num_drafts_total"),
        ("different", "meaning of metric vllm:spec_decode_num_drafts_total"),
    ]


@pytest.mark.parametrize(
    ("place", "name", "near"),
    [("flags", "--speculative-config", "--spec-config"), ("meta_info", "spec_verify_ct", "spec_verify_count")],
)
def test_a_flag_or_a_key_of_an_answer_that_vanished(sides, place, name, near):
    names = surface(sides[1])["names"]
    names[place] = [near if each == name else each for each in names[place]]
    found = red(compare(*sides), "UPG051")
    assert name in found.summary
    assert near in found.actual


def test_another_flag_that_vanished_is_listed(sides):
    surface(sides[1])["names"]["flags"].remove("--dtype")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "surface") == [("different", "name in flags: --dtype")]


def test_a_surface_that_could_not_be_read_says_why(sides):
    measured(sides[1], "startup")["servers"][SPEC]["surface"] = {"missing": "/metrics answered 404"}
    assert "/metrics answered 404" in red(compare(*sides), "UPG002", Verdict.INVALID).summary


# --- start-up and verdicts


def test_a_slower_start_is_listed_by_phase_and_never_red(sides):
    facts = measured(sides[1], "startup")["servers"][SPEC]
    facts.update(started_in_s=500.0, timeline=[[0.0, "launched"], [480.0, "loading the target"], [500.0, "ready"]])
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "start-up") == [("different", "spec: launched")]
    assert any("most moved: launched, +450.0 s" in each.summary for each in judgement.findings)


@pytest.mark.parametrize("verdict", ["FAIL", "INVALID", "INCONCLUSIVE"])
def test_a_suite_that_passed_and_does_not_any_more(sides, verdict):
    judged(sides[1], "startup", "STA001", verdict)
    found = red(compare(*sides), "UPG070", Verdict[verdict])
    assert "startup was PASS in 0.28.0" in found.summary
    assert "STA001" in found.summary
    assert "what the suite says" in found.cause


def test_a_server_that_does_not_start_any_more(sides):
    new = sides[1]
    new["evidence"] = "loading the drafter raised: no module named fc"
    for item in new["judgements"]:
        item["measurements"] = {}
        item["findings"] = []
        judged(new, item["suite"], "STA004", "FAIL" if item["suite"] == "startup" else "INVALID")
    judgement = compare(*sides)
    (failed,) = [each for each in judgement.findings if each.verdict is Verdict.FAIL]
    assert judgement.verdict is Verdict.FAIL
    assert "startup was PASS in 0.28.0 and is FAIL in 0.32.0: STA004" in failed.summary
    assert failed.remedy == "what the suite advises"
    lacking = [each.summary for each in judgement.findings if each.code == "UPG002"]
    assert any("no module named fc" in each for each in lacking)
    assert any("measurements of the suite acceptance (STA004" in each for each in lacking)


def test_a_suite_that_was_red_before_is_named_and_no_regression(sides):
    for side in sides:
        judged(side, "startup", "STA001", "FAIL")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "verdicts") == [("was red before", "startup")]
    assert any("startup was red before and still is: STA001" in each.summary for each in judgement.findings)


def test_a_red_suite_does_not_hide_what_is_newly_red_in_it(sides):
    judged(sides[0], "startup", "STA001", "FAIL")
    judged(sides[1], "startup", "STA001", "FAIL")
    judged(sides[1], "startup", "STA003", "FAIL")
    assert "STA003" in red(compare(*sides), "UPG070").summary


def test_a_suite_that_is_green_again_is_better(sides):
    judged(sides[0], "startup", "STA001", "FAIL")
    judgement = compare(*sides)
    assert judgement.verdict is Verdict.PASS
    assert changes(judgement, "verdicts") == [("better", "startup")]


@pytest.mark.parametrize("verdict", ["INVALID", "INCONCLUSIVE"])
def test_where_the_old_version_decided_nothing_a_failure_is_no_regression_and_no_pass(sides, verdict):
    judged(sides[0], "startup", "STA001", verdict)
    judged(sides[1], "startup", "STA001", "FAIL")
    red(compare(*sides), "UPG070", Verdict[verdict])


def test_a_suite_that_only_one_side_asks(sides):
    sides[1]["not_asked"] = {}
    assert compare(*sides).verdict is Verdict.INVALID


def test_a_verdict_that_its_findings_do_not_bear_out(sides):
    next(item for item in sides[1]["judgements"] if item["suite"] == "startup")["findings"][0]["verdict"] = "FAIL"
    assert "startup" in red(compare(*sides), "UPG002", Verdict.INVALID).summary


# --- whole records


def test_records_are_matched_by_pair_engine_runner_and_device(old, new):
    second = copy.deepcopy(new["cases"][0])
    second.update(id="small-vllm-v2", runner_asked="v2")
    new["cases"].insert(0, second)
    judgements = compare_records(old, new)
    assert judgements["small-vllm-v1"].verdict is Verdict.PASS
    found = red(judgements["small-vllm-v2"], "UPG002", Verdict.INVALID)
    assert "the old version's record lacks the case small vllm v2 cpu" in found.summary
    judgements = compare_records(new, old)
    assert "the new version's record lacks" in red(judgements["small-vllm-v2"], "UPG002", Verdict.INVALID).summary


def test_runs_that_have_two_sides_themselves_are_matched_side_by_side(old, new):
    for each in (old, new):
        each["cases"].append(copy.deepcopy(each["cases"][0]))
        for item, side in zip(each["cases"], ("old", "new"), strict=True):
            item.update(id=f"small-vllm-v1-{side}", side=side)
    judgements = compare_records(old, new)
    assert {name: each.verdict for name, each in judgements.items()} == {
        "small-vllm-v1-old": Verdict.PASS,
        "small-vllm-v1-new": Verdict.PASS,
    }


def test_two_cases_of_a_kind_and_no_case_at_all(old, new):
    twice = {**new, "cases": new["cases"] * 2}
    assert "it has 2" in red(compare_records(old, twice)["small-vllm-v1"], "UPG002", Verdict.INVALID).summary
    (nothing,) = compare_records({**old, "cases": []}, {**new, "cases": []}).values()
    assert nothing.verdict is Verdict.INVALID


# --- missing evidence

NOT_COMPARED = re.compile(
    r"id|machine\.(cores|memory_bytes|system|python)|rebuilt|provenance|prompts\.(count|seed)"
    r"|engine\.(distribution|python|site_packages|package|packages\..*|lock|origin|source)|(target|drafter)\.(folder|bytes)"
    # A suite's words, and what no comparison is made of: weights and aux_hidden are compared from the evidence.
    r"|judgements\.\d\.(test|seconds|findings\.0\.(?!code|verdict).*)"
    r"|(weights|aux_hidden)\.(measurements.*|findings\.0\.code)|(startup|losslessness|acceptance)\.findings\.0\.code"
    # The oracle's counts are for the report: whether they were equal is the finding ACC020.
    r"|acceptance\.measurements\.oracle.*"
    r"|acceptance\.measurements\.(label|k|max_tokens|missing|witnesses|prompts\.0\.(tokens|finish_reason|seconds))"
    r"|losslessness\.measurements\.(?!comparisons).*"
    r"|losslessness\.measurements\.comparisons\.0\.(ignore_eos|segments\.0\.(?!spec$|plain$).*)"
    r"|startup\.measurements\.servers\.[\w-]+\.(argv|env|proof|log)"
    # Another version may have other metrics; what the old one had is missed, what it has not is new.
    r"|startup\.measurements\.servers\.[\w-]+\.surface\.metrics\.[\w:]+"
)


def paths(data, at=()):
    """Yield the place of every entry of an object, and of the first entry of every list."""
    for name, value in data.items() if isinstance(data, dict) else list(enumerate(data))[:1]:
        if isinstance(name, str):
            yield (*at, name)
        if isinstance(value, (dict, list)):
            yield from paths(value, (*at, name))


def without(data, path):
    """Return a copy without the entry at that place."""
    made = copy.copy(data)
    if len(path) == 1:
        del made[path[0]]
    else:
        made[path[0]] = without(data[path[0]], path[1:])
    return made


def required(of):
    """Yield the place of every piece of evidence that a comparison rests on."""
    for path in paths({name: value for name, value in of.items() if name != "judgements"}):
        if not NOT_COMPARED.fullmatch(".".join(map(str, path))):
            yield path
    yield ("judgements",)
    for index, item in enumerate(of["judgements"]):
        for path in paths(item):
            where = ".".join(map(str, path))
            if not (NOT_COMPARED.fullmatch(f"judgements.{index}.{where}")
                    or NOT_COMPARED.fullmatch(f"{item['suite']}.{where}")):  # fmt: skip
                yield ("judgements", index, *path)


def test_what_is_missing_on_either_side_is_never_a_pass(old):
    whole = case(old)
    whole["evidence"].update(loads=loads(whole, "target", 0) + loads(whole, "drafter", 0))
    whole["evidence"].update(servings=whole["evidence"]["servings"][:1])
    places = list(required(whole))
    assert len(places) > 150
    passed = []
    for path in places:
        cut = without(whole, path)
        verdicts = {compare(cut, whole).verdict, compare(whole, cut).verdict}
        if verdicts != {Verdict.INVALID}:
            passed.append(path)
    assert not passed


@pytest.mark.parametrize("spoil", [None, "", [], {}, "?", -1])
def test_what_is_unreadable_on_either_side_is_never_a_pass(old, spoil):
    whole = case(old)
    for path in (
        ("pair",), ("engine",), ("machine",), ("evidence",), ("judgements",), ("target",), ("prompts", "digest"),
        ("evidence", "loads"), ("evidence", "servings"), ("evidence", "config"), ("engine", "packages"),
        *(("judgements", index, name) for index in range(5) for name in ("findings", "verdict", "suite")),
        *(("judgements", index, "measurements") for index, item in enumerate(whole["judgements"])
          if item["suite"] in ("acceptance", "losslessness", "startup")),
    ):  # fmt: skip
        spoiled = copy.deepcopy(whole)
        put(*path, value=spoil)(spoiled)
        assert compare(spoiled, whole).verdict is not Verdict.PASS, path
        assert compare(whole, spoiled).verdict is not Verdict.PASS, path


def test_a_red_comparison_does_not_turn_green_by_losing_a_suite_or_the_evidence(sides):
    old, new = sides
    accept(new, 0, 1)
    judged(new, "acceptance", "ACC020", "FAIL")
    assert compare(old, new).verdict is Verdict.FAIL
    places = [("evidence",), *(("judgements", index) for index in range(5))]
    places += [("judgements", index, "measurements") for index in range(5)]
    for path in places:
        assert compare(without(old, path), new).verdict is not Verdict.PASS, path
        assert compare(old, without(new, path)).verdict is not Verdict.PASS, path


# --- what the engine's figures mean


DRAFTS = "/metrics vllm:spec_decode_num_drafts_total"
MEANINGS = {DRAFTS: ["total: verify steps"], "log Accepted": ["interval: accepted draft tokens"], "log Odd": []}


@pytest.fixture
def understood(sides):
    """Two cases whose pair asks for the suite `metrics`."""
    for of in sides:
        del of["not_asked"]["metrics"]
        of["judgements"].append(
            {
                "suite": "metrics",
                "test": "test_metrics",
                "verdict": "PASS",
                "findings": [dict.fromkeys(FINDING, "") | {"code": "MET010", "verdict": "PASS"}],
                "measurements": {"can_mean": copy.deepcopy(MEANINGS)},
            }
        )
    return sides


def test_figures_that_mean_the_same(understood):
    judgement = compare(*understood)
    assert judgement.verdict is Verdict.PASS, judgement.as_text()
    assert [each.summary for each in judgement.findings if each.code == "UPG052"] == [
        "2 acceptance figures mean the same"
    ]


def test_a_figure_that_means_something_else_is_named(understood):
    measured(understood[1], "metrics")["can_mean"][DRAFTS] = ["total: draft tokens"]
    found = red(compare(*understood), "UPG052")
    assert DRAFTS in found.summary
    assert "total: verify steps" in found.expected
    assert "total: draft tokens" in found.actual
    assert (found.verdict, changes(compare(*understood), "figures")[0][0]) == (Verdict.FAIL, "worse")


def test_a_figure_that_may_still_mean_the_same_is_no_regression(understood):
    measured(understood[1], "metrics")["can_mean"][DRAFTS] = ["request: verify steps", "total: verify steps"]
    assert compare(*understood).verdict is Verdict.PASS


def test_figures_that_only_one_side_has_are_listed(understood):
    measured(understood[1], "metrics")["can_mean"]["log New"] = ["interval: accept length"]
    assert changes(compare(*understood), "figures") == [("different", "log New")]


def test_figures_that_only_one_side_looked_at_are_no_comparison(understood):
    understood[0]["not_asked"]["metrics"] = "always right"
    judgement = compare(*understood)
    assert judgement.verdict is Verdict.INVALID
    assert "what the engine's figures mean" in judgement.as_text()


@pytest.mark.parametrize("meanings", [None, []])
def test_a_figure_that_is_gone_or_no_longer_understood_is_red(understood, meanings):
    can_mean = measured(understood[1], "metrics")["can_mean"]
    del can_mean[DRAFTS]
    if meanings is not None:
        can_mean[DRAFTS] = meanings
    found = red(compare(*understood), "UPG052")
    assert ("not there" if meanings is None else "not understood") in found.actual


def test_no_figure_that_is_understood_is_no_comparison(understood):
    measured(understood[0], "metrics")["can_mean"] = {"log Odd": []}
    assert compare(*understood).verdict is Verdict.INVALID


def test_what_an_invalid_run_says_of_figures_is_no_comparison(understood):
    """The suite leaves the meanings out where acceptance is not the canary's."""
    del measured(understood[1], "metrics")["can_mean"]
    judgement = compare(*understood)
    assert judgement.verdict is Verdict.INVALID
    assert "measurements of the suite metrics" in judgement.as_text()


def test_a_case_of_a_merged_run_is_compared_as_of_the_machine_that_measured_it(tmp_path):
    whole = record(tmp_path)
    merged = copy.deepcopy(whole)
    merged["merged"] = [{"run": "shard", "machine": merged["machine"]}, {"run": "other", "machine": None}, "?"]
    merged["machine"] = {"system": "Linux"}
    merged["cases"][0]["run"] = "shard"
    [judgement] = compare_records(whole, merged).values()
    assert judgement.verdict is Verdict.PASS
    merged["cases"][0]["run"] = "another"
    [judgement] = compare_records(whole, merged).values()
    assert judgement.verdict is Verdict.INVALID
