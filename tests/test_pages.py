"""Numbers of README and results/: generated from records, or with the commit that made them."""

import re
import shlex

from conftest import ROOT, call, scripts

import analyze

BLOCK = re.compile(r"(<!-- (\S+):begin -->\n).*?(<!-- \2:end -->)", re.S)
TEXTS = {}
for path in [ROOT / "README.md", *sorted(ROOT.glob("results/**/*.md"))]:
    TEXTS[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
MADE = re.compile(r"commits?\W+[0-9a-f]{7}|git (checkout|show) [0-9a-f]{7}|\.jsonl\)", re.I)
# Sections whose tables measure nothing: the paper's numbers, sizes, settings, what code does.
FACTS = """
Read it; The paper's numbers; The paper's averages; The paper's claims, mini; The models;
Data: sources, generators, what was verified; The five that matter most; Training and evaluation;
Models and initialisation; Single tasks; Architectures beyond the paper's two;
What a file may hold; The paper's other numbers
"""
FACTS = re.split(r";\s+", FACTS.strip())


def test_every_generated_block_is_what_its_command_prints(tmp_path, monkeypatch):
    """The commands that pages name fill empty blocks again, or a section says which commit did."""
    scripts(tmp_path, "*.md", "results/**/*.md", "results/**/*.jsonl", "results/**/*.npz")
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    commands = {"analyze.py readme"}
    for page, text in TEXTS.items():
        (tmp_path / page).write_text(BLOCK.sub(r"\1\3", text), encoding="utf-8")
        words = " ".join(text.split())
        commands |= {*re.findall(rf"`python (analyze\.py [^`]* --readme {page})`", words)}
    assert len(commands) > 3
    for command in sorted(commands):
        done = call(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for page, text in TEXTS.items():
        after = (tmp_path / page).read_text(encoding="utf-8")
        printed = {match[2]: match[0] for match in BLOCK.finditer(after)}
        for match in BLOCK.finditer(text):
            if printed[match[2]] == match[1] + match[3]:
                section = section_of(text, match.start())
                assert MADE.search(section), f"nothing makes {match[2]} of {page}"
            else:
                assert printed[match[2]] == match[0], f"{match[2]} of {page}"


def section_of(text, place):
    """The page down to its second heading, and the section around a place down to there."""
    # comments are no headings
    plain = re.sub(r"(?ms)^```.*?^```", lambda match: match[0].replace("#", "%"), text)
    starts = [match.start() for match in re.finditer(r"^#+ ", plain, re.M)] + [len(text)]
    first = max(start for start in starts if start <= place)
    return text[: starts[1]] + text[first : next(start for start in starts if start > first)]


def test_every_table_with_numbers_says_what_made_it():
    """Its section or the page's head links kept records or names a commit."""
    for page, text in TEXTS.items():
        for table in re.finditer(r"(?m)^\|---.*\n(\|.*\n)+", text):
            section = section_of(text, table.start())
            title = re.findall(r"^#+ (.*)", section, re.M)[-1]
            numbers = re.search(r"[|( ±]\d", re.sub(r"`.*?`", "", table[0]))
            if numbers and title not in FACTS:
                assert MADE.search(section), f"{page}, {title}: {table[0][:80]}"


def test_links_and_pictures_exist():
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            exists = target.startswith("http") or (ROOT / page).parent.joinpath(target).exists()
            assert exists, f"{page}: {target}"


def test_the_upper_end_of_costs_bounds_every_measured_step():
    """1.5 times the computed time and 36 microseconds per operation."""
    text = TEXTS["results/gpu.md"].split("<!-- steps:begin")[1].split("<!-- steps:end")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line[:2] == "| "]
    steps = [[cell.strip() for cell in row] for row in rows[1:]]
    for task, model, _, operations, ms, _, best, realistic, *_ in steps:
        bound = 1.5 * float(best) + 0.036 * int(operations) + 0.01
        assert float(ms) <= float(realistic) <= bound, (task, model)
    assert len(steps) == 14
