"""The field's words: what stands in README, pages, docstrings, comments, printed lines, tables and
errors."""

import re

import pytest
from conftest import ROOT

# What nobody else calls it -> what it is called.
WORDS = {
    r"answers? for all": "majority class (regression: mean)",
    r"head alone|(?<!linear )(?<!linear_)\bprobes?\b": "linear probe",
    r"\b(cannot|can) be told|told (from|apart)": "significant, or say",
    r"\btells? (of|from|apart|whether|which|how)": "significant, or say",
    r"today's": "the default budget",
    r"\bbeds?\b": "task, or task and setting",
    r"\barms?\b": "variant",
    r"\bways? out\b|\b(an|any) exit\b": "alternative to SPT",
    r"\bnear positions": "locality bias",
    r"costs? nothing": "trivial and linear baselines",
    r"\bits kind\b": "state space models",
    r"\b(lags?|lagging) behind|\bfar it lags": "gap to the best model from scratch",
    r"(?<!denoising )\bskill\b": "denoising skill",
    r"\b(has|have|had) \.?\d+\.\d": "scores, uses",
    r"of your own|\byour own data": "your data",
    r"\ba model says|\bwas said\b": "prediction, output, report",
    r"(?<!leave )(?<!leaves )\balone\b": "only, or by itself",
    r"\ball of (a|an|it|both)\b": "all, every, or nothing",
    r"\ba (dot|line|file|row|folder|page|panel|table|bar|seed|chain|class|task|model|step|batch) "
    r"an? ": "one ... per ...",
    r"\b(is|are|was|were|ends?|comes?) level\b|\blevel with": "not significantly different",
    r"\bon (film )?reviews\b": "IMDb (characters read), once with the task's name",
    r"\bso many\b|\bsome (two|three|half|\d)": "about, the number",
}
# Where another meaning of a word, or a kept name, is meant.
EXCEPTIONS = {
    "results/findings.md": r"(?<!denoising )\bskill\b|today's "
    r"passes\*|(?<!\w)\*\w[^*\n]{,60}\w\*(?!\w)|"
    r"\"[^\"\n]{,60}\"",  # defined there; words of kept figures
    "tasks/speech.py": r"\bbed\b",  # a word to recognise
    "experiments/entries.py": r"\bprobe\b",  # in names of runs
    "experiments/sweep.py": r"\bprobe\b",
}


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "*.md", "*.sh")
    for folder in (
        "",
        "tasks/",
        "zoo/",
        "engine/",
        "experiments/",
        "compare/",
        "results/",
        "results/*/",
    )
    for path in ROOT.glob(folder + pattern)
)


@pytest.mark.parametrize("name", FILES)
def test_the_field_words_are_used(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):  # commands and names of runs keep their spelling
        text = re.sub(
            r"```.*?```|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), text, flags=re.S
        )
    text = re.sub(EXCEPTIONS.get(name, r"(?!)"), "", text)
    found = {
        f"line {text[: match.start()].count(chr(10)) + 1}: {match[0]!r}, not {word}"
        for old, word in WORDS.items()
        for match in re.finditer(old, text, re.IGNORECASE)
    }
    assert not found, (name, sorted(found))
