"""Random config files, each written together with the knowledge of which of its characters may change.

A file is a list of segments. `KEPT` text must survive to the letter, each line in one piece; `FLOW` text must
survive too, but keys may be added between its pieces; a `HOLE` is the old value of a leaf, or the nothing
that stands where a mapping will be, and may go.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT, FLOW, HOLE = "kept", "flow", "hole"

METRICS = ["final_loss", "train_runtime", "total_steps", "last_loss", "mean_loss"]
ARTIFACTS = ["train_results", "train_loss_plot", "training_log"]
SCALAR_OUTPUTS = ["checkpoint_path", "training_curves"]
MAPPING_OUTPUTS = {"training_metrics": METRICS, "artifacts": ARTIFACTS}

# fmt: off
PLAIN = [
    "1_23_1", "yes", "0755", "1e-4", "12:30", "2024-01-01", "0.5", "-3", "null", "~", "true", "http://x/y#z",
    "a:b", "demo-run", "/abs/p", "../p", "C:\\x", ".5", "0x1F", "1_000", "Да", "模型", "<<x", "=x", "a&b",
]
# fmt: on
QUOTED = ['"a # b"', "'it''s'", '"\\u00e9\\n"', "''", '""', '"{not: flow}"', "'- x'", '"日本 🙂"']
COMMENTS = ["x", "key: value", "{ [ , ' \"", "ünïcödé 🙂", "- item", "#", "output:", "\ttab", "%YAML"]


class Segment(NamedTuple):
    text: str
    kind: str


@dataclass
class ConfigText:
    segments: list[Segment]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    def fragments(self) -> list[str]:
        """What must be found in the changed text, in this order."""
        found: list[str] = []
        for text, kind in self.segments:
            if kind == KEPT:
                found += [part for part in re.split(r"(\r\n|\n)", text) if part]
            elif kind == FLOW:
                found += re.findall(r"#[^\r\n]*|\s+|[^\s{}\[\],]+|[{}\[\],]", text)
        return found


@dataclass
class ConfigWriter:
    rng: random.Random
    newline: str
    segments: list[Segment] = field(default_factory=list)
    count: int = 0
    anchors: list[str] = field(default_factory=list)
    on_path: bool = False  # anchors and merge keys are refused there
    ends_in_block_scalar: bool = False

    # -- small parts ------------------------------------------------------------------------------

    def put(self, text: str, kind: str = KEPT) -> None:
        self.segments.append(Segment(text, kind))

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    def unique(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def comment(self) -> str:
        return f"# {self.unique('c')} {self.rng.choice(COMMENTS)}"

    def trailer(self) -> str:
        """Spaces and perhaps a comment behind content."""
        return self.pick("", "", " ", "   ") if self.chance(60) else self.pick(" ", "    ") + self.comment()

    def end_line(self, most: int, *, after_block_scalar: bool = False) -> None:
        """The line break and whatever may stand between two entries: blank lines, comments."""
        self.ends_in_block_scalar = after_block_scalar
        self.put(self.newline)
        for _ in range(self.rng.randrange(3) if self.chance(30) else 0):
            column = self.rng.randrange(most + 1 if after_block_scalar else most + 6)
            self.put((" " * column + self.comment() if self.chance(70) else "") + self.newline)

    def key(self, name: str) -> str:
        style = self.pick("", "", "", '"', "'")
        return f"{style}{name}{style}"

    def scalar(self) -> str:
        return self.rng.choice(QUOTED) if self.chance(40) else self.rng.choice(PLAIN)

    # -- text that is nobody's business -----------------------------------------------------------

    def other_entry(self, column: int, depth: int = 0) -> None:
        name = self.key(self.unique("other"))
        if self.chance(8):
            self.put(" " * column + f"? {name}" + self.newline + " " * column + ":")
        else:
            self.put(" " * column + name + self.pick(":", ":", " :"))
        choice = self.rng.randrange(9 if depth < 2 else 6)
        if choice <= 2:
            self.put(f" {self.anchor_text()}{self.scalar()}{self.trailer()}")
        elif choice == 3:
            self.put(self.trailer())
        elif choice == 4:
            self.put(f" {self.flow_other(column)}{self.trailer()}")
        elif choice == 5:
            self.wrapped_scalar(column)
            return
        elif choice == 6:
            self.sequence(column)
            return
        else:
            anchor = self.anchor_text()
            self.put(f" {anchor}".rstrip() + self.trailer())
            self.end_line(column)
            step = self.rng.randrange(1, 9)
            if self.anchors and not self.on_path and self.chance(15):
                self.put(" " * (column + step) + f"<<: *{self.rng.choice(self.anchors)}" + self.newline)
            for _ in range(self.rng.randrange(1, 3)):
                self.other_entry(column + step, depth + 1)
            self.anchors += [anchor.strip(" &")] if anchor else []
            return
        self.end_line(column)

    def anchor_text(self) -> str:
        if self.on_path or not self.chance(10):
            return ""
        return f"&{self.unique('anchor')} "

    def wrapped_scalar(self, column: int) -> None:
        inner = self.newline + " " * (column + self.rng.randrange(1, 7))
        choice = self.rng.randrange(4)
        if choice == 0:
            self.put(f" plain words{inner}go on{self.trailer()}")
        elif choice == 1:
            self.put(f' "quoted # words{inner}: go on"{self.trailer()}')
        else:
            header = self.pick("|", ">", "|-", ">-", "|+")
            comment = f"  {self.comment()}" if self.chance(30) else ""
            self.put(f" {header}{comment}{inner}text: # {self.count}{inner}- more")
        self.end_line(column, after_block_scalar=choice >= 2)

    def sequence(self, column: int) -> None:
        self.put(self.trailer())
        self.end_line(column)
        indent = " " * (column + self.rng.randrange(0, 5))
        for _ in range(self.rng.randrange(1, 4)):
            item = self.rng.choice([self.scalar(), "", self.flow_other(column), "a: 1", "- nested"])
            self.put(f"{indent}- {item}{self.trailer()}")
            self.end_line(column)

    def flow_other(self, column: int) -> str:
        """A flow collection that no path goes through."""
        gap = self.newline + " " * (column + 3) if self.chance(25) else self.pick("", " ")
        comment = f" {self.comment()}{self.newline}{' ' * (column + 2)}" if self.chance(15) else ""
        inner = self.rng.choice(['a: 1, "b": [x, y]', "a: {c: d}, e", '"k":1', "a: 1,"])
        body = inner if self.chance(50) else ""
        if self.chance(40):
            return f"[{gap}{self.rng.choice(['1, 2', 'a, [b]', '{a: 1}', ''])}{gap}{comment}]"
        return f"{{{gap}{body}{gap}{comment}}}"

    # -- the outputs ------------------------------------------------------------------------------

    def block_entries(self, column: int, entries: list[Callable[[int], None]]) -> None:
        self.rng.shuffle(entries)
        for entry in entries:
            entry(column)

    def nothing_yet(self, column: int) -> None:
        """What may stand where a mapping will be."""
        choice = self.rng.randrange(5)
        if choice == 0:
            self.put(self.trailer())
        elif choice == 1:
            self.put(self.pick(" ", "   ") + self.pick("~", "null", "{}", "{ }"), HOLE)
            self.put(self.trailer())
        elif choice == 2:
            self.put(self.trailer())
            self.put(self.newline + " " * (column + 3) + self.pick("~", "null", "{}"), HOLE)
        else:
            self.put(" ")
            self.put(f"{{ {self.comment()}{self.newline}{' ' * (column + 2)}}}", FLOW)
        self.end_line(column)

    def nested(self, name: str, column: int, entries: list[Callable[[int], None]]) -> None:
        self.put(" " * column + self.key(name) + ":")
        if not entries:
            self.nothing_yet(column)
            return
        self.put(self.trailer())
        self.end_line(column)
        self.block_entries(column + self.rng.randrange(1, 9), entries)

    def some(self, names: list[str]) -> list[str]:
        return [name for name in names if self.chance(60)]

    def output(self, column: int) -> None:
        if self.chance(20):
            self.put(" " * column + self.key("output") + ":")
            self.flow_output()
            self.put(self.trailer())
            self.end_line(column)
            return
        entries: list[Callable[[int], None]] = []
        if self.chance(85):
            entries += [lambda c, n=name: self.scalar_output(n, c) for name in self.some(SCALAR_OUTPUTS)]
            entries += [
                lambda c, n=name: self.mapping_output(n, c) for name in self.some(list(MAPPING_OUTPUTS))
            ]
            entries += [lambda c: self.other_entry(c, depth=2)] * self.rng.randrange(2)
        self.nested("output", column, entries)

    def mapping_output(self, name: str, column: int) -> None:
        if self.chance(20):
            self.put(" " * column + self.key(name) + ":")
            self.flow_mapping_output(MAPPING_OUTPUTS[name])
            self.put(self.trailer())
            self.end_line(column)
            return
        leaves = self.some(MAPPING_OUTPUTS[name])
        entries: list[Callable[[int], None]] = [lambda c, n=leaf: self.scalar_output(n, c) for leaf in leaves]
        if self.chance(25):
            declared: list[Callable[[int], None]] = [lambda c: self.description(c)]
            if self.chance(70):
                declared.append(lambda c: self.nested("value", c, entries))
            self.nested(name, column, declared)
        else:
            self.nested(name, column, entries)

    def description(self, column: int) -> None:
        self.put(" " * column + f"description: {self.scalar()}{self.trailer()}")
        self.end_line(column)

    def scalar_output(self, name: str, column: int, *, plain: bool = False) -> None:
        head = " " * column + self.key(name) + ":"
        choice = self.rng.randrange(6 if plain else 8)
        if choice == 0:
            self.put(head)
            self.put(self.trailer())
        elif choice <= 2:
            self.put(f"{head} ")
            self.put(self.scalar() if self.chance(80) else "[a,b]", HOLE)
            self.put(self.trailer())
        elif choice == 3:
            self.put(head + self.trailer() + self.newline + " " * (column + self.rng.randrange(1, 5)))
            self.put(self.scalar(), HOLE)
            self.put(self.trailer())
        elif choice == 4:
            self.put(f"{head} ")
            self.put(self.pick("|-", ">", "|"), HOLE)
            self.put(f"  {self.comment()}" if self.chance(40) else "")
            inner = self.newline + " " * (column + self.rng.randrange(1, 5))
            self.put(f"{inner}old{inner}text", HOLE)
            self.end_line(column, after_block_scalar=True)
            return
        elif choice == 5:
            self.put(head)
            self.put(self.trailer())
            inner = self.newline + " " * (column + 1)
            self.put(f"{inner}- a{inner}- b", HOLE)
        elif choice == 6:
            self.put(head)
            self.flow_declaration()
            self.put(self.trailer())
        else:
            entries: list[Callable[[int], None]] = [lambda c: self.description(c)]
            if self.chance(70):
                entries.append(lambda c: self.scalar_output("value", c, plain=True))
            self.nested(name, column, entries)
            return
        self.end_line(column)

    # -- the same in flow style -------------------------------------------------------------------

    def gap(self) -> str:
        choice = self.rng.randrange(10)
        if choice == 0:
            return f" {self.comment()}{self.newline}                     "
        return f"{self.newline}                     " if choice == 1 else self.pick("", " ", "  ")

    def flow_mapping(self, entries: list[Callable[[], None]]) -> None:
        self.rng.shuffle(entries)
        if not entries:  # only with a comment inside is it worth keeping
            empty = "{" + self.gap() + "}"
            self.put(f" {empty}", FLOW if "#" in empty else HOLE)
            return
        self.put(" {" + self.gap(), FLOW)
        for index, entry in enumerate(entries):
            if index:
                self.put("," + (self.gap() or " "), FLOW)
            entry()
        self.put(self.pick("", ",") + self.gap() + "}", FLOW)

    def flow_declaration(self) -> None:
        entries: list[Callable[[], None]] = [
            lambda: self.put(f"description: {self.rng.choice(QUOTED)}", FLOW)
        ]
        if self.chance(70):
            entries.append(lambda: self.flow_scalar("value", declared=False))
        self.flow_mapping(entries)

    def flow_scalar(self, name: str, *, declared: bool = True) -> None:
        choice = self.rng.randrange(6 if declared else 5)
        if choice == 0:
            self.put(self.key(name), FLOW)
        elif choice == 1:
            self.put(self.key(name) + ":", FLOW)
        elif choice == 5:
            self.flow_named(name, self.flow_declaration)
        else:
            self.put(self.key(name) + ": ", FLOW)
            self.put(
                self.rng.choice(["old/path", '"a, b"', "'x'", "12", "[a, {b: c}]", "null", "~", "0.5"]), HOLE
            )

    def flow_mapping_output(self, leaves: list[str]) -> None:
        chosen = [lambda n=name: self.flow_scalar(n) for name in self.some(leaves)]
        self.flow_mapping([*chosen, lambda: self.put("extra: [1, 2]", FLOW)] if self.chance(60) else chosen)

    def flow_output(self) -> None:
        entries: list[Callable[[], None]] = []
        for name in self.some(SCALAR_OUTPUTS):
            entries.append(lambda n=name: self.flow_scalar(n))
        for name in self.some(list(MAPPING_OUTPUTS)):
            entries.append(lambda n=name: self.flow_nested(n))
        self.flow_mapping(entries)

    def flow_nested(self, name: str) -> None:
        if self.chance(20):
            self.put(self.key(name) + ": ", FLOW)
            self.put(self.pick("null", "~", "{}"), HOLE)
        else:
            self.flow_named(name, lambda: self.flow_mapping_output(MAPPING_OUTPUTS[name]))

    def flow_named(self, name: str, value: Callable[[], None]) -> None:
        self.put(self.key(name) + ":", FLOW)
        value()

    # -- whole files ------------------------------------------------------------------------------

    def runtime_info(self, column: int) -> None:
        if self.chance(10):
            self.put(" " * column + self.key("runtime_info") + ":")
            self.flow_mapping([lambda: self.flow_named("output", self.flow_output)])
            self.put(self.trailer())
            self.end_line(column)
            return
        entries: list[Callable[[int], None]] = [self.output] if self.chance(85) else []
        entries += [lambda c: self.other_entry(c, depth=2)] * self.rng.randrange(3)
        self.on_path = True
        self.nested("runtime_info", column, entries)
        self.on_path = False

    def config(self) -> ConfigText:
        if self.chance(25):
            self.put("\ufeff")
        if self.chance(40):
            self.put(self.comment() + self.newline)
        if self.chance(20):
            self.put("---" + self.trailer() + self.newline)
        column = self.pick("", "", "", " ", "   ").count(" ")
        for _ in range(self.rng.randrange(3)):
            self.other_entry(column)
        if self.chance(85):
            self.runtime_info(column)
        for _ in range(self.rng.randrange(3)):
            self.other_entry(column)
        if self.segments and self.segments[-1].text == self.newline and not self.ends_in_block_scalar:
            if self.chance(30):
                self.segments.pop()
        elif self.chance(10) and any(segment.kind == HOLE for segment in self.segments):
            self.put("..." + self.newline)
        return ConfigText(self.segments)


def json_config(rng: random.Random) -> str:
    """The same configs as JSON, which is YAML too."""
    output: dict[str, object] = {
        name: rng.choice([None, "old", 1]) for name in SCALAR_OUTPUTS if rng.random() < 0.6
    }
    for name, leaves in MAPPING_OUTPUTS.items():
        if rng.random() < 0.6:
            output[name] = {leaf: rng.choice([None, 1.5, "x"]) for leaf in leaves if rng.random() < 0.5}
    data = {"meta": [1, {"a": "b"}], "runtime_info": {"input": {}, "output": output}}
    return json.dumps(data, indent=rng.choice([None, 1, 4]), ensure_ascii=rng.random() < 0.5)
