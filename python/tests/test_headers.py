"""The ctypes declarations are those of the headers: every struct, field, enum value and function."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest
from esmm import _errors, _lib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INCLUDE = os.path.join(ROOT, "include")


def headers():
    text = ""
    for name in sorted(os.listdir(INCLUDE)):
        with open(os.path.join(INCLUDE, name)) as f:
            text += f.read()
    return re.sub(r"^#.*$", "", re.sub(r"/\*.*?\*/", " ", text, flags=re.S), flags=re.M)


TEXT = headers()


def structs():
    """name -> its fields, in order: (name, type in C, is a pointer)"""
    found = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", TEXT, flags=re.S):
        fields = []
        for declaration in body.split(";"):
            declaration = " ".join(declaration.split())
            if not declaration:
                continue
            function = re.match(r".*\(\*(\w+)\)\(.*\)$", declaration)
            if function:
                fields.append((function.group(1), "function", True))
                continue
            kind, first = re.match(r"((?:const )?(?:struct )?\w+)\s*(.*)$", declaration).groups()
            for part in first.split(","):
                field = re.match(r"\s*(\**)(\w+)(?:\[\d+\])?$", part)
                fields.append((field.group(2), kind.replace("const ", ""), bool(field.group(1))))
        found[name] = fields
    return found


def enums():
    """name -> its values"""
    found = {}
    for name, body in re.findall(r"(?:typedef )?enum (\w*)\s*\{(.*?)\}", TEXT, flags=re.S):
        found[name] = {n: int(v) for n, v in re.findall(r"(\w+)\s*=\s*(\d+)", body)}
    return found


def functions():
    """name -> (result, arguments) in C"""
    found = {}
    for declaration in re.findall(r"ESMM_API ([^;]*);", TEXT):
        declaration = " ".join(declaration.split())
        result, name, arguments = re.match(r"(.*?)(esmm_\w+)\((.*)\)$", declaration).groups()
        arguments = re.sub(r"void \(\*progress\)\([^)]*\)", "progress", arguments)
        found[name] = (result.strip(), [] if arguments == "void" else [a.strip() for a in arguments.split(",")])
    return found


def test_the_headers_were_understood():
    assert len(structs()) == TEXT.count("typedef struct") - len(re.findall(r"typedef struct \w+ \w+;", TEXT))
    assert len(functions()) == TEXT.count("ESMM_API ")
    assert len(enums()) == TEXT.count("enum ")


def test_every_struct_is_declared():
    assert set(structs()) == set(_lib.STRUCTS)


@pytest.mark.parametrize("name", sorted(_lib.STRUCTS))
def test_fields(name):
    assert [f[0] for f in structs()[name]] == [f[0] for f in _lib.STRUCTS[name]._fields_]


SCALARS = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
}


@pytest.mark.parametrize("name", sorted(_lib.STRUCTS))
def test_types_of_fields(name):
    for (field, kind, pointer), (_, ours) in zip(structs()[name], [f[:2] for f in _lib.STRUCTS[name]._fields_]):
        if pointer:
            assert ctypes.sizeof(ours) == 8 and ours not in SCALARS.values(), field
        elif kind in SCALARS:
            assert ours is SCALARS[kind] or getattr(ours, "_type_", None) is SCALARS[kind], field
        elif kind == "char":
            assert ours._type_ is ctypes.c_char, field
        elif kind in _lib.STRUCTS:
            assert ours is _lib.STRUCTS[kind], field
        else:
            assert kind in enums() and ours is ctypes.c_int, field


def test_enums():
    ours = {}
    for table in (
        _lib.DTYPES,
        _lib.ORDERS,
        _lib.PLACES,
        _lib.FORMAT_KINDS,
        _lib.USES,
        _lib.ACTIVATIONS,
        _lib.KERNEL_FLAGS,
        _lib.GENERATORS,
        _lib.PRUNE_SCOPES,
        _lib.OPERANDS,
        _lib.FFN_MODES,
        _lib.SPARSIFIERS,
    ):
        ours.update(table)
    ours.update({"ESMM_" + ("" if s == 0 else "ERR_") + s.name: int(s) for s in _errors.Status})
    theirs = {}
    for values in enums().values():
        theirs.update(values)
    assert ours == theirs


def test_every_status_is_an_exception():
    assert set(_errors.BY_STATUS) == set(_errors.Status) - {_errors.Status.OK}
    for status, kind in _errors.BY_STATUS.items():
        e = _errors.error(status, "text")
        assert type(e) is kind and e.status is status and str(e) == "text"


def test_every_function_is_declared():
    assert set(functions()) == set(_lib.FUNCTIONS)


@pytest.mark.parametrize("name", sorted(_lib.FUNCTIONS))
def test_signature(name):
    result, arguments = functions()[name]
    ours_result, ours = _lib.FUNCTIONS[name]
    if result.endswith("*"):
        assert ours_result is (ctypes.c_char_p if "char" in result else ctypes.c_void_p)
    elif result == "void":
        assert ours_result is None
    else:
        assert ours_result is SCALARS.get(result, ctypes.c_int)
    assert len(arguments) == len(ours), arguments
    for theirs, mine in zip(arguments, ours):
        if theirs == "progress":
            assert mine is _lib.PROGRESS
        elif theirs.startswith("const char *"):
            assert mine is ctypes.c_char_p
        elif "*" in theirs:
            assert mine is ctypes.c_void_p
        else:
            assert mine is SCALARS.get(theirs.split()[0], ctypes.c_int), theirs


def test_offsets_are_the_compilers(tmp_path):
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler is installed")
    lines = ["#include <esmm.h>", "#include <esmm_ffn.h>", "#include <esmm_tools.h>", "#include <stdio.h>"]
    lines += ["int main(void) {"]
    expected = []
    for name, kind in _lib.STRUCTS.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(kind)}")
        for field in kind._fields_:
            lines.append(f'  printf("{name}.{field[0]} %zu %zu\\n", offsetof({name}, {field[0]}),')
            lines.append(f"         sizeof((({name} *)0)->{field[0]}));")
            place = getattr(kind, field[0])
            expected.append(f"{name}.{field[0]} {place.offset} {place.size}")
    lines += ["  return 0;", "}"]
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines))
    subprocess.run([compiler, "-I", INCLUDE, str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert printed.split("\n")[:-1] == expected


def test_interface_is_the_headers_version():
    with open(os.path.join(INCLUDE, "esmm.h")) as f:
        text = f.read()
    version = [int(re.search(rf"ESMM_VERSION_{part} (\d+)", text).group(1)) for part in ("MAJOR", "MINOR")]
    assert tuple(version) == _lib.INTERFACE
