"""The field's words: in README, pages, docstrings, comments, printed lines, tables, errors."""

import re

from conftest import ROOT

# What nobody else calls it -> what it is called.
WORDS = {
    r"answers? for all|costs? nothing": "majority class (regression: mean); trivial baseline",
    r"head alone|(?<!linear )(?<!linear_)\bprobes?\b": "linear probe",
    r"\b(cannot|can) be told|told (from|apart)|\btells? (of|from|apart|whether|which|how)": "say",
    r"\bbeds?\b|\barms?\b|\bways? out\b|\b(an|any) exit\b": "task; variant; alternative to SPT",
    r"today's|\bnear positions|\bits kind\b": "default budget; locality bias; state space models",
    r"\b(lags?|lagging) behind|\bfar it lags": "gap to the best model from scratch",
    r"(?<!denoising )\bskill\b": "denoising skill",
    r"\b(has|have|had) \.?\d+\.\d": "scores, uses",
    r"of your own|\byour own data|\ba model says|\bwas said\b": "your data; prediction, report",
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
    "results/findings.md": r"(?<!denoising )\bskill\b|today's passes\*|"  # defined there;
    r"(?<!\w)\*\w[^*\n]{,60}\w\*(?!\w)|\"[^\"\n]{,60}\"",  # words of kept figures
    "tasks/speech.py": r"\bbed\b",  # a word to recognise
    "experiments/entries.py": r"\bprobe\b",  # in names of runs
    "experiments/sweep.py": r"\bprobe\b",
}
ROOMS = "", "tasks/", "zoo/", "engine/", "experiments/", "compare/", "results/", "results/*/"


def test_the_field_words_are_used():
    patterns = [f"{room}*.{kind}" for room in ROOMS for kind in ("py", "md", "sh")]
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if name.endswith(".md"):  # commands and names of runs keep their spelling
            text = re.sub(r"(?s)```.*?```|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), text)
        text = re.sub(EXCEPTIONS.get(name, r"(?!)"), "", text)
        for old, word in WORDS.items():
            match = re.search(old, text, re.IGNORECASE)
            line = match and f"{name}, line {text[: match.start()].count(chr(10)) + 1}"
            assert not match, f"{line}: {match[0]!r}, not {word}"
