"""What the README and the docs say, against the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from docs.tables import PAGE, filled
from fedspec_dist import methods
from fedspec_dist.config import DEFAULTS, load
from launch.axes import load_sweep

ROOT = Path(__file__).parents[1]
METHODS_PAGE = PAGE.read_text()
README = (ROOT / "README.md").read_text()
CONFIG_TABLE = README.split("## Config")[1].split("##")[0]
# A section written as one row of the table, its entries being explained there.
WHOLE = {"data.partition", "model", "filter", "phases", "server.filter", "server.optimizer"}


def _keys(section: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in section.items():
        dotted = f"{prefix}{key}"
        keys += _keys(value, f"{dotted}.") if isinstance(value, dict) and dotted not in WHOLE else [dotted]
    return keys


@pytest.mark.parametrize("key", _keys(DEFAULTS))
def test_every_key_is_in_the_readmes_table(key: str) -> None:
    assert f"`{key}`" in CONFIG_TABLE


@pytest.mark.parametrize("family", methods.FAMILIES)
def test_every_method_is_in_the_readmes_table(family: str) -> None:
    (row,) = [line for line in CONFIG_TABLE.splitlines() if line.startswith(f"| `{family}`")]
    for name in methods.FAMILIES[family].table:
        # The server's filter has those of the clients'.
        assert f"`{name}`" in row or family == "server.filter", name


@pytest.mark.parametrize("family", methods.FAMILIES)
def test_every_parameter_is_in_the_readmes_table_or_on_the_page_of_methods(family: str) -> None:
    known = CONFIG_TABLE + METHODS_PAGE
    for name, row in methods.FAMILIES[family].table.items():
        for parameter in {**row.parameters, **methods.FAMILIES[family].common}:
            assert re.search(rf"`(data\.)?{parameter}`", known), f"{name}.{parameter}"


def test_the_tables_of_methods_are_what_the_code_says() -> None:
    assert filled(METHODS_PAGE) == METHODS_PAGE, "docs/methods.md is out of date: run python -m docs.tables"


def test_the_readmes_example_prints_what_it_says() -> None:
    code, output = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "sweeps"],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_every_config_in_the_repository_is_valid(path: Path) -> None:
    assert load(path).rounds > 0


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]), ids=str
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]), ids=str
)
def test_files_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"`((?:fedspec_dist|tests|configs|benchmarks|docs)/[\w./]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/studies/*.yaml")), ids=lambda path: path.name)
def test_every_study_in_the_repository_is_valid(path: Path) -> None:
    assert load_sweep(path).cases


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)`", (ROOT / "docs" / page).read_text()):
        assert (ROOT / "tests" / name).is_file(), name
