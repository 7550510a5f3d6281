"""The structs and constants of structs.py are those of the library's headers, as a C compiler lays them out."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from parlay.compiled import structs
from parlay.compiled.build import SOURCES, compiler_command

HEADERS = ("stream.h", "shelf.h", "core.h")
WITH_SUFFIX = ("Layer", "Ranks", "Ngrams", "Model", "Prefix", "Segment", "Growth")
"""Structs whose names have ``Struct`` at their end in Python, where a class of that name is something else."""
FIELDS: Mapping[str, str] = {
    "Linear.in": "Linear.inputs",
    "Linear.out": "Linear.outputs",
    "Packing.in": "Packing.inputs",
    "Packing.out": "Packing.outputs",
    "Shelving.from": "Shelving.source",
}
"""Fields that have other names in Python."""
KINDS: Mapping[object, str] = {
    ctypes.c_double: "double",
    ctypes.c_float: "float",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
}
CONSTANTS = (
    *("MOST_EXPERTS", "MOST_CHOSEN", "MOST_DRAFT", "MOST_CHILDREN", "LAYER_PRODUCTS", "EXPERT_PRODUCTS"),
    *("STREAM_BLOCK", "STREAM_ENDED", "STREAM_DAMAGED", "STREAM_STALLED"),
)
PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include "core.h"
#define NAMED(KIND) KIND: #KIND
#define KIND(X) _Generic((X), NAMED(double), NAMED(float), NAMED(int64_t), NAMED(uint64_t), default: "other")
#define CONSTANT(NAME) printf("%s %lld\\n", #NAME, (long long)NAME);
#define STRUCT(NAME) printf("%s %zu\\n", #NAME, sizeof(NAME));
#define FIELD(OF, NAME) \\
    printf("%s %zu %zu %s\\n", #OF "." #NAME, offsetof(OF, NAME), sizeof(((OF *)0)->NAME), KIND(((OF *)0)->NAME));
int main(void) {
    LINES
}
"""


def declared(header: str) -> Iterator[tuple[str, list[str]]]:
    """Each struct of a header, and the names of its fields in order."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    for body, name in re.findall(r"typedef struct \w*\s*\{(.*?)\} (\w+);", text, flags=re.DOTALL):
        body = re.sub(r"\([^*)][^)]*\)|\[\d+\]", "", body)  # the parameters of functions, the lengths of arrays
        yield name, re.findall(r"(\w+)\)?\s*[,;]", body)


def of_c(folder: Path) -> list[str]:
    """A line for each constant, struct and field of the headers, written by a program that includes them."""
    lines = [f"CONSTANT({name})" for name in CONSTANTS]
    for header in HEADERS:
        for name, fields in declared((SOURCES / header).read_text(encoding="utf-8")):
            lines += [f"STRUCT({name})", *(f"FIELD({name}, {field})" for field in fields)]
    source, program = folder / "structs.c", folder / "structs"
    source.write_text(PROGRAM.replace("LINES", "\n    ".join(lines)), encoding="utf-8")
    subprocess.run([*compiler_command(), "-std=gnu11", "-I", str(SOURCES), str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return [" ".join([in_python(name), *rest]) for name, *rest in map(str.split, said.splitlines())]


def in_python(name: str) -> str:
    """What Python calls a struct or a field of C."""
    struct, dot, field = FIELDS.get(name, name).partition(".")
    return f"{struct}Struct{dot}{field}" if struct in WITH_SUFFIX else struct + dot + field


def of_python() -> list[str]:
    """The same lines, of what structs.py declares."""
    lines = [f"{name} {vars(structs)[name]}" for name in CONSTANTS]
    for name, struct in vars(structs).items():
        if isinstance(struct, type) and issubclass(struct, ctypes.Structure) and struct is not ctypes.Structure:
            lines.append(f"{name} {ctypes.sizeof(struct)}")
            for field, kind, *_ in struct._fields_:
                at = vars(struct)[field]
                lines.append(f"{name}.{field} {at.offset} {at.size} {KINDS.get(kind, 'other')}")
    return lines


def test_structs_are_those_of_the_headers(tmp_path: Path) -> None:
    """A field that only one side has would make the other read wrong memory."""
    assert sorted(of_python()) == sorted(of_c(tmp_path))
