"""What a user can see of a run, and in what two runs of one suite differ.

Compared without order: every report that plugins receive, JUnit XML, the terminal, warnings, what `--lf` remembers, the
exit status, and how often each fixture was set up and torn down. Times, addresses and the names of temporary
directories are left out, and our own lines.

What is marked "wide" comes from a fixture that is wider than a function: it is in the report of whichever test ran
first or last there. It is taken out of the reports and counted: once for each time that the fixture was set up or torn
down.
"""

from __future__ import annotations

import difflib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_VARIABLE = (
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x#"),
    (re.compile(r"\b\d+\.\d+ ?s\b"), "#s"),
    (re.compile(r" \(\d+:\d\d:\d\d\)"), ""),  # beside the seconds of a run that takes more than a minute
    (re.compile(r"pytest-of-\w+/pytest-\d+"), "pytest-of/pytest"),
    (re.compile(r"popen-gw\d+/"), ""),
    (re.compile(r"\[gw\d+\] [^\n]*\n*"), ""),
    (re.compile(r"Thread-\d+"), "Thread-#"),
    # A wider fixture that cannot be set up names the test that asked first.
    (re.compile(r"(<SubRequest '[^']+' for) <[^>]+>>"), r"\1 #>"),
)
_WIDE_ERROR = re.compile(r"RuntimeError: (wide \S+ cannot be torn down)")
# Lines of the terminal that say how far the run is, of which machine it is, and what is ours.
_PASSING = re.compile(
    r"^(.*\[ *\d+%\]|[.FEsxXu,\-]+|={3,} test session starts.*|platform .*|rootdir: .*|plugins: .*|cachedir: .*"
    r"|configfile: .*|collecting .*|collected \d+ .*|created: .*|\d+ workers? \[.*|scheduling tests .*"
    r"|bringing up nodes.*|initialized: .*|ready: .*|async-compile: .*|-* ?generated xml file: .*|-+ *|=+ *)$"
)
# Lines of the terminal that tell in whose report a wider fixture's output and warnings are.
_MOVING = re.compile(r"^(- Captured .*|_ .*|\S+::\S+)$")
_TEARDOWN = '"when": "teardown"'
_ENDS = ("set up ", "tear down ")  # how the two events of a fixture begin in the side log
_OURS = re.compile(r"^-+ async-compile -+$")
_SECTION = re.compile(r"^(=|-){3,} .* (=|-){3,}$")


def neutral(text: str) -> str:
    """The text without what is different in each run."""
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    return text


@dataclass
class Observation:
    """One run, as a user sees it.

    Attributes:
        reports: by test, how often each report was received, as neutral text.
        junit: by test, each record in the JUnit XML.
        warnings: how often each was recorded.
        lines: the lines of the terminal.
        interactions: how often a debugger would have been opened, where.
        begun: how often each test was announced, and its end.
        wide: what wider fixtures printed, logged, warned of and raised.
        events: the side log: fixtures set up and torn down, kernels run.
        last_failed: what the next `--lf` would run.
        moved: the tests whose tear-down has the error of a wider fixture, perhaps beside one of their own.
        order: the reports in their order.
        status: pytest's exit status, as it says and as the process ended.
    """

    reports: dict[str, Counter[str]] = field(default_factory=dict)
    junit: dict[str, Counter[str]] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    interactions: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    wide: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    last_failed: set[str] = field(default_factory=set)
    status: list[int] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""

    def deferrals(self) -> int:
        """How often tests were put off, as our summary says."""
        found = re.search(r"deferred: .*, (\d+) times? in all", self.stdout)
        return int(found.group(1)) if found else 0


def observe(folder: Path, project: Path, status: int, stdout: str, stderr: str) -> Observation:
    """Read what a run left in `folder` (reports.jsonl, junit.xml, side.log) and in the cache of `project`."""
    seen = Observation(status=[status], stdout=stdout, stderr=stderr)
    for line in _lines_of(folder / "reports.jsonl"):
        _take(seen, json.loads(line))
    if (folder / "junit.xml").exists():
        _read_junit(seen, folder / "junit.xml")
    for line in _lines_of(folder / "side.log"):
        seen.events[line.partition(" ")[2]] += 1
    failed = project / ".pytest_cache" / "v" / "cache" / "lastfailed"
    if failed.exists():
        seen.last_failed = set(json.loads(failed.read_text()))
    seen.lines = Counter(_terminal_lines(stdout))
    return seen


def _lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _take(seen: Observation, entry: dict[str, Any]) -> None:
    kind = entry.pop("kind")
    if kind == "report":
        nodeid, entry["text"] = entry["nodeid"], neutral(entry["text"]).strip()
        entry["context"] = re.sub("[\"']", "", entry["context"])  # xdist sends the values of a subtest as text
        seen.order.append(f"{nodeid} {entry['when']} {entry['outcome']}")
        errors = _WIDE_ERROR.findall(entry["text"])
        if errors:
            seen.wide.update(set(errors))
            seen.moved.add(nodeid)
            entry["outcome"], entry["text"], entry["wasxfail"] = "passed", "", None
        sections = []
        for title, content in entry["sections"]:
            narrow, wide = _split(content)
            if entry["when"] == "teardown":
                stream = title.split()[1]  # "Captured stdout setup"
                seen.wide.update(f"{stream}: {line}" for line in wide)
            if narrow:
                sections.append(f"{title}\n{narrow}")
        entry["sections"] = sections
        text = neutral(json.dumps(entry, sort_keys=True, indent=1))
        seen.reports.setdefault(nodeid, Counter())[text] += 1
    elif kind == "warning":
        if ": wide " in entry["text"]:
            seen.wide[entry["text"]] += 1
        else:
            seen.warnings[neutral(json.dumps(entry, sort_keys=True))] += 1
    elif kind == "interact":
        if "wide" not in entry["error"]:
            seen.interactions[neutral(json.dumps(entry, sort_keys=True))] += 1
    elif kind == "status":
        seen.status.append(entry["status"])
    else:
        seen.begun[f"{kind} {entry['nodeid']}"] += 1


def _junit_name(nodeid: str) -> str:
    path, *names = nodeid.split("::")
    return "::".join([".".join([path.removesuffix(".py").replace("/", "."), *names[:-1]]), names[-1]])


def _split(content: str) -> tuple[str, list[str]]:
    """What is one test's own, and the lines of wider fixtures."""
    # pytest writes the letter of a subtest where the test's own output is captured.
    lines = [re.sub(r"^[u,]+(?=narrow|wide|$)", "", line) for line in content.splitlines()]
    wide = [line for line in lines if re.search(r"\bwide \S+ in ", line)]
    rest = "\n".join(line for line in lines if line not in wide)
    return rest.strip("\n"), [re.sub(r"\S+\.py:\d+", "#", line) for line in wide]


def _read_junit(seen: Observation, path: Path) -> None:
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        case.attrib.pop("time", None)
        parts = [json.dumps(case.attrib, sort_keys=True)]
        for part in case:
            text = "".join(part.itertext())
            if part.tag in {"error", "failure"} and _WIDE_ERROR.search(text):
                continue
            narrow = _split(text)[0]
            if part.tag == "properties":
                narrow = json.dumps([entry.attrib for entry in part])
            attributes = json.dumps(part.attrib, sort_keys=True)
            narrow = "\n".join(line for line in narrow.splitlines() if not re.match(r"^-+ Captured .* -+$", line))
            if narrow.strip() or part.tag not in {"system-out", "system-err"}:
                parts.append(f"{part.tag} {attributes} {narrow.strip()}")
        name = f"{case.get('classname')}::{case.get('name')}"
        seen.junit.setdefault(name, Counter())[neutral("\n".join(parts))] += 1


def _terminal_lines(stdout: str) -> Iterator[str]:
    is_ours = False
    for line in neutral(stdout).splitlines():
        line = line.rstrip()
        if _OURS.match(line):
            is_ours = True
        elif _SECTION.match(line):
            is_ours = False
        if is_ours or not line or _PASSING.match(line) or re.search(r"\bwide\b", line):
            continue
        line = re.sub(r"\(i='(\d)'\)", r"(i=\1)", line)  # xdist sends the values of a subtest as text
        yield re.sub(r"^(=|-|_)+ (.*?) \1+$", r"\1 \2", line)


@dataclass(frozen=True)
class Allowance:
    """How a run may differ from the plain one.

    Attributes:
        workers: in how many processes tests ran: each may set up its own wider fixtures.
        extra: how often module- and class-scoped fixtures together may be set up more than in the plain run.
        has_terminal: whether the terminal is compared; not where fixtures that are torn down once more fail once more.
    """

    workers: int = 1
    extra: int = 0
    has_terminal: bool = True


def differences(plain: Observation, other: Observation, allowance: Allowance) -> list[str]:
    """What a user could see of `other` that is not as in `plain`, one line or more each; empty where all is well."""
    found = []
    if plain.status != other.status:
        found.append(f"exit status {other.status}, not {plain.status}")
    moved = plain.moved | other.moved
    found += _compare_by_test("reports", *(_without_teardown_of(moved, seen.reports) for seen in (plain, other)))
    found += _compare_by_test("junit", *(_without_records_of(moved, seen.junit) for seen in (plain, other)))
    found += _compare("interactions", *(_interactions(seen, moved) for seen in (plain, other)))
    for name in ("warnings", "begun"):
        found += _compare(name, getattr(plain, name), getattr(other, name))
    has_wide_errors = any(line.endswith("cannot be torn down") for line in plain.wide)
    if allowance.has_terminal and not has_wide_errors:
        found += _compare("terminal", *(_lasting_lines(seen) if plain.wide else seen.lines for seen in (plain, other)))
    if plain.last_failed != other.last_failed and not has_wide_errors:
        found.append(f"remembered as failed: {sorted(plain.last_failed ^ other.last_failed)} in one of both only")
    return found + list(_fixture_differences(plain, other, allowance)) + list(unpaired(other))


def _without_teardown_of(moved: set[str], reports: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    return {
        nodeid: Counter({text: n for text, n in counts.items() if nodeid not in moved or _TEARDOWN not in text})
        for nodeid, counts in reports.items()
    }


def _without_records_of(moved: set[str], records: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    names = set(map(_junit_name, moved))
    return {name: counts for name, counts in records.items() if name not in names}


def _interactions(seen: Observation, moved: set[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text, number in seen.interactions.items():
        if json.loads(text)["nodeid"] not in moved or _TEARDOWN not in text:
            counts[text] += number
    return counts


def _lasting_lines(seen: Observation) -> Counter[str]:
    lines: Counter[str] = Counter()
    for line, number in seen.lines.items():
        if not _MOVING.match(line):
            lines[re.sub(r", \d+ warnings?", "", line)] += number
    return lines


def _compare_by_test(name: str, plain: dict[str, Counter[str]], other: dict[str, Counter[str]]) -> list[str]:
    found = []
    for nodeid in sorted(plain.keys() | other.keys()):
        found += _compare(f"{name} of {nodeid}", plain.get(nodeid, Counter()), other.get(nodeid, Counter()))
    return found


def _compare(name: str, plain: Counter[str], other: Counter[str]) -> list[str]:
    missing, added = plain - other, other - plain
    if not missing and not added:
        return []
    lines = [f"{name}: {sum(missing.values())} missing, {sum(added.values())} added"]
    before = [line for text in sorted(missing.elements()) for line in text.replace("\\n", "\n").splitlines()]
    now = [line for text in sorted(added.elements()) for line in text.replace("\\n", "\n").splitlines()]
    lines += [
        line for line in difflib.unified_diff(before, now, lineterm="", n=1) if not line.startswith(("---", "+++"))
    ]
    return ["\n  ".join(lines[:40])]


def extra_set_ups(plain: Observation, other: Observation) -> Counter[str]:
    """How often each wider fixture was set up more than in the plain run."""
    return Counter({event: n for event, n in (other.events - plain.events).items() if event.startswith("set up wide")})


def _fixture_differences(plain: Observation, other: Observation, allowance: Allowance) -> Iterator[str]:
    for event in sorted(plain.events.keys() | other.events.keys()):
        before, now = plain.events[event], other.events[event]
        if event.startswith("set up wide") and now < before and allowance.workers == 1:
            yield f"{event}: {now} times, not {before}"
        if event.startswith("set up wide") and "session" in event and now > before * allowance.workers:
            yield f"{event}: {now} times, not {before}"
        if event.startswith(("set up narrow", "tear down narrow")) and now < before:
            yield f"{event}: {now} times, not {before}"
    extra = sum(extra_set_ups(plain, other).values())
    if allowance.workers == 1 and extra > allowance.extra:
        yield f"wider fixtures were set up {extra} times more, at most {allowance.extra} allowed"


def unpaired(seen: Observation) -> Iterator[str]:
    """Fixtures that were not torn down as often as they were set up, and wide lines that are not said once each."""
    failing = {line.removesuffix(" cannot be torn down") for line in seen.wide}
    labels = {event.removeprefix(start) for start in _ENDS for event in seen.events if event.startswith(start)}
    for label in sorted(labels):
        begun, number = (seen.events[start + label] for start in _ENDS)
        if begun != number:
            yield f"{label}: set up {begun} times, torn down {number} times"
        if "_class" in label:  # used by a function outside of a class, it is the function's own
            continue
        if label in failing and seen.wide[f"{label} cannot be torn down"] != number:
            yield f"{label}: torn down {number} times, its error seen {seen.wide[f'{label} cannot be torn down']} times"
    yield from _unsaid(seen)


def _unsaid(seen: Observation) -> Iterator[str]:
    said: dict[str, list[int]] = {}
    for line, number in seen.wide.items():
        match = re.search(r"(wide \S+) in (set-up|tear-down)", line)
        if match:
            said.setdefault(f"{match.group(2)} {match.group(1)}", []).append(number)
    for what, numbers in sorted(said.items()):
        phase, _, label = what.partition(" ")
        if "_class" in label:
            continue
        expected = seen.events[f"{'begin' if phase == 'set-up' else 'tear down'} {label}"]
        if any(number != expected for number in numbers) or len(numbers) != 4:
            yield f"{label}: {phase} {expected} times, said {sorted(numbers)} times on stdout, stderr, log, warnings"


def show(found: Iterable[str]) -> str:
    """The differences as one text, cut to a length that can be read."""
    text = "\n".join(found)
    return text if len(text) < 12_000 else text[:12_000] + "\n..."
