"""Numbers of README and results/: generated from kept records, or with the commit that made
them."""

import re
import shlex

import pytest
from conftest import ROOT, call, scripts

import analyze

BLOCK = re.compile(r"(<!-- (\S+):begin -->\n).*?(<!-- \2:end -->)", re.S)
PAGES = sorted(
    path.relative_to(ROOT) for path in [ROOT / "README.md", *ROOT.glob("results/**/*.md")]
)
MADE = re.compile(r"commits?\W+[0-9a-f]{7}|git (checkout|show) [0-9a-f]{7}|\.jsonl\)", re.I)
# Sections whose tables measure nothing: the paper's numbers, sizes, settings, what code does.
FACTS = {
    "README.md": ["Read it", "The paper's numbers"],
    "results/averages.md": ["The paper's averages"],
    "results/data.md": ["Data: sources, generators, what was verified"],
    "results/differences.md": [
        "The five that matter most",
        "Training and evaluation",
        "Models and initialisation",
        "Single tasks",
        "Architectures beyond the paper's two",
    ],
    "results/mini/tables.md": ["The paper's claims, mini"],  # test_analyze.py prints it
    "results/models.md": ["The models"],
    "results/own.md": ["What a file may hold"],
    "results/recipes.md": ["The paper's other numbers"],
}


def test_every_generated_block_is_what_its_command_prints(tmp_path, monkeypatch):
    """All blocks are emptied. The commands that pages name fill them again, all but those that say
    which commit printed them."""
    scripts(tmp_path, "*.md", "results/**/*.md", "results/**/*.jsonl", "results/**/*.npz")
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    commands = {"analyze.py readme"}
    for page, text in texts.items():
        (tmp_path / page).write_text(BLOCK.sub(r"\1\3", text))
        commands |= {
            *re.findall(rf"`python (analyze\.py [^`]* --readme {page})`", " ".join(text.split()))
        }
    assert len(commands) >= 4
    for command in sorted(commands):
        done = call(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for page, text in texts.items():
        printed = {match[2]: match[0] for match in BLOCK.finditer((tmp_path / page).read_text())}
        for match in BLOCK.finditer(text):
            if printed[match[2]] == match[1] + match[3]:
                assert MADE.search(section_of(text, match.start())), (
                    f"nothing makes {match[2]} of {page}"
                )
            else:
                assert printed[match[2]] == match[0], f"{match[2]} of {page}"


def section_of(text, place):
    """The page down to its second heading, and the section around a place down to there."""
    # comments are no headings
    plain = re.sub(r"(?ms)^```.*?^```", lambda match: match[0].replace("#", "%"), text)
    starts = [match.start() for match in re.finditer(r"^#+ ", plain, re.M)] + [len(text)]
    first = max(start for start in starts if start <= place)
    return text[: starts[1]] + text[first : next(start for start in starts if start > first)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_table_with_numbers_says_what_made_it(page):
    """Its section or the page's head links kept records or names a commit."""
    text = (ROOT / page).read_text()
    for table in re.finditer(r"(?m)^\|---.*\n(\|.*\n)+", text):
        section = section_of(text, table.start())
        title = re.findall(r"^#+ (.*)", section, re.M)[-1]
        if re.search(r"[|( ±]\d", re.sub(r"`.*?`", "", table[0])) and title not in FACTS.get(
            str(page), []
        ):
            assert MADE.search(section), f"{page}, {title}: {table[0][:80]}"


def rows_of(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:2] == "| "
    ]


def test_the_upper_end_of_costs_bounds_every_measured_step():
    """1.5 times the computed time and 36 microseconds per operation, in gpu.md's steps, costs.md's
    hours and README."""
    gpu, costs, readme = (
        (ROOT / name).read_text() for name in ("results/gpu.md", "results/costs.md", "README.md")
    )
    steps = rows_of(gpu.split("<!-- steps:begin")[1].split("<!-- steps:end")[0])[1:]
    for task, model, _, operations, ms, _, best, realistic, *_ in steps:
        assert (
            float(ms) <= float(realistic) <= 1.5 * float(best) + 0.036 * int(operations) + 0.01
        ), (task, model)
    assert len(steps) == 14 and "to 14 steps there, one measurement each" in costs
    hours = {}
    for *names, operations, _, _, ms, _, _, _, spent in (
        row for row in rows_of(costs) if len(row) > 8 and " to " in row[-1]
    ):
        low, high = hours[tuple(names[:3])] = [float(end) for end in spent.split(" to ")]
        waits = 0.036 * int(operations.replace(",", ""))
        ratios = [
            (1.5 * c + waits) / max(c, waits * 5 / 36) for c in (float(ms) - 0.05, float(ms) + 0.05)
        ]
        assert (low - 0.05) * min(ratios) <= high + 0.05 and high - 0.05 <= (low + 0.05) * max(
            ratios
        ), names
    for stage in ("pretrain", "spt", "scratch"):
        assert "{:.0f} to {:.0f}".format(*hours["pathx", "s4", stage]) in readme
