"""What the README and the docs say, against the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from benchmarks.local_methods import SETTINGS
from docs.tables import COSTLY, PAGE, filled, step_times
from docs.tables import README as README_PAGE
from fedspec_dist.config import DEFAULTS, load, methods
from launch.axes import load_sweep

ROOT = Path(__file__).parents[1]
METHODS_PAGE = PAGE.read_text()
DATA_PAGE = (ROOT / "docs" / "data.md").read_text()
README = README_PAGE.read_text()
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
def test_every_parameter_is_in_the_readmes_table_or_on_the_page_of_methods(family: str) -> None:
    known = CONFIG_TABLE + METHODS_PAGE + DATA_PAGE
    for name, row in methods.FAMILIES[family].table.items():
        for parameter in {**row.parameters, **methods.FAMILIES[family].common}:
            assert re.search(rf"`(data\.)?{parameter}`", known), f"{name}.{parameter}"


@pytest.mark.parametrize("page", [PAGE, README_PAGE], ids=lambda page: page.name)
def test_what_pages_have_from_the_code_is_what_the_code_says(page: Path) -> None:
    assert filled(page) == page.read_text(), f"{page.name} is out of date: run python -m docs.tables"


@pytest.mark.parametrize("family", [family for family in methods.FAMILIES if family != "server.filter"])
def test_a_new_method_comes_into_its_row_of_the_readmes_table(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = methods.FAMILIES[family].table
    monkeypatch.setitem(table, "brand_new", next(iter(table.values())))
    (row,) = [line for line in filled(README_PAGE).splitlines() if "`brand_new`" in line]
    assert row.startswith(f"| `{family}` |")


def test_steps_cost_what_fedavgs_do_but_for_those_that_are_named() -> None:
    times = step_times()
    assert times.keys() <= SETTINGS.keys(), "record it again: python -m benchmarks.local_methods"
    costly = {label for label, ratio in times.items() if ratio > 1.1}
    assert costly <= COSTLY.keys() <= times.keys()


def test_the_readmes_example_prints_what_it_says() -> None:
    code, output = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", DATA_PAGE, re.DOTALL))
def test_the_examples_of_data_are_configs(example: str, tmp_path: Path) -> None:
    (tmp_path / "example.yaml").write_text(example)
    config = load(str(tmp_path / "example.yaml"))
    assert f"`{config.data.dataset.type}`" in DATA_PAGE


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
