#!/usr/bin/env python3
"""make_corpus.py: writes tests/fuzz/corpus/safetensors and tests/fuzz/corpus/pt, good files and damaged ones.

    python3 tests/fuzz/make_corpus.py [DIR]      needs nothing but Python 3; same files each time

The .pt files come from Python's own pickler, with stand-ins of torch's names, so that the reader is held to what
torch.save really writes and not to what its author thinks. The C tests (test_safetensors.c, test_pt.c) know what each
file must give.
"""
import collections
import json
import os
import pickle
import struct
import sys
import types
import zipfile

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")


def put(kind, name, data):
    path = os.path.join(ROOT, kind)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, name), "wb") as file:
        file.write(data)


def floats(*values):
    return struct.pack("<%df" % len(values), *values)


# ---- safetensors ----


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def make_safetensors():
    def save(name, *args, **kw):
        put("safetensors", name + ".safetensors", safetensors(*args, **kw))

    two = {"b": tensor("F32", [2, 3], 0, 24), "a": tensor("F16", [2, 2], 24, 32)}
    data = floats(1, 0, 2, 0, 0, -3) + struct.pack("<4H", 0x3C00, 0, 0, 0x4000)
    save("good", {"__metadata__": {"format": "pt"}, **two}, data)
    save("empty", {})
    save("empty_tensor", {"none": tensor("F32", [0, 7], 0, 0), "x": tensor("BF16", [1, 2], 0, 4)}, b"\x80\x3f\0\0")
    save("scalar", {"step": tensor("I64", [], 0, 8)}, struct.pack("<q", 7))
    save("dtypes", {t: tensor(t, [8], 0, 0) if not b else tensor(t, [8], 8 * i, 8 * i + b) for i, (t, b) in
                    enumerate([("U8", 8), ("I8", 8), ("BOOL", 8), ("F8_E4M3", 8)])}, bytes(32))
    save("f4", {"x": tensor("F4", [4], 0, 2)}, bytes(2))
    put("safetensors", "unaligned.safetensors",
        struct.pack("<Q", 57) + b'{"x":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}} ' + floats(1, 2))

    save("overlap", {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12))
    save("gap", {"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, bytes(12))
    save("gap_at_start", {"a": tensor("F32", [1], 4, 8)}, bytes(8))
    save("trailing", {"a": tensor("F32", [1], 0, 4)}, bytes(9))
    save("truncated_data", two, data[:-3])
    put("safetensors", "truncated_header.safetensors", safetensors(two, data)[:40])
    put("safetensors", "truncated_length.safetensors", b"\x10\0\0")
    save("huge_length", {}, length=1 << 40)
    save("huge_shape", {"a": tensor("F32", [1 << 62, 1 << 62], 0, 8)}, bytes(8))
    save("overflow_to_fit", {"a": tensor("F32", [1 << 33, 1 << 31], 0, 0)})
    save("many_rows_of_nothing", {"a": tensor("F32", [1 << 50, 0], 0, 0)})
    save("overflow_beside_zero", {"a": tensor("F32", [0, 1 << 62, 1 << 62], 0, 0)})
    save("huge_number", b'{"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,0]}}')
    save("size_differs", {"a": tensor("F32", [3], 0, 8)}, bytes(8))
    save("backwards", {"a": tensor("F32", [0], 8, 0)}, bytes(8))
    save("negative_shape", {"a": tensor("F32", [-1, -1], 0, 4)}, bytes(4))
    save("negative_offset", {"a": tensor("F32", [1], -4, 0)}, bytes(4))
    save("fraction", {"a": tensor("F32", [1.0], 0, 4)}, bytes(4))
    save("half_byte", {"a": tensor("F4", [3], 0, 1)}, bytes(1))
    save("unknown_dtype", {"a": tensor("F31", [1], 0, 4)}, bytes(4))
    save("wrong_dtype", {"a": tensor(32, [1], 0, 4)}, bytes(4))
    save("wrong_shape", {"a": tensor("F32", "1", 0, 4)}, bytes(4))
    save("wrong_offsets", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4))
    save("no_offsets", {"a": {"dtype": "F32", "shape": [1]}}, bytes(4))
    save("no_object", {"a": 7})
    save("metadata_number", {"__metadata__": {"a": 1}})
    save("metadata_list", {"__metadata__": []})
    save("list", b"[]      ")
    save("many_dimensions", {"a": tensor("F32", [1] * 40, 0, 4)}, bytes(4))
    save("same_name", b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                      b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8))
    save("control_name", b'{"a\\u001b[2J":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4))
    save("empty_name", {"": tensor("F32", [1], 0, 4)}, bytes(4))
    save("not_utf8", b'{"a\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4))
    save("not_json", b'{"a":{"dtype"}}')
    save("behind_json", b'{} x')
    save("deep", b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}")


# ---- .pt ----

torch = types.ModuleType("torch")
torch._utils = types.ModuleType("torch._utils")
torch.storage = types.ModuleType("torch.storage")
for module in (torch, torch._utils, torch.storage):
    sys.modules[module.__name__] = module


def stand_in(module, name, callable_too=True):
    thing = type(name, (), {"__module__": module.__name__})
    setattr(module, name, thing)
    return thing


FloatStorage = stand_in(torch, "FloatStorage")
HalfStorage = stand_in(torch, "HalfStorage")
BFloat16Storage = stand_in(torch, "BFloat16Storage")
LongStorage = stand_in(torch, "LongStorage")
QUInt8Storage = stand_in(torch, "QUInt8Storage")
UntypedStorage = stand_in(torch.storage, "UntypedStorage")
Size = stand_in(torch, "Size")
float8 = stand_in(torch, "float8_e4m3fn")
rebuild_v2 = stand_in(torch._utils, "_rebuild_tensor_v2")
rebuild_v3 = stand_in(torch._utils, "_rebuild_tensor_v3")
rebuild_parameter = stand_in(torch._utils, "_rebuild_parameter")


class Storage:
    def __init__(self, kind, key, data, elements, location="cpu"):
        self.kind, self.key, self.data, self.elements, self.location = kind, key, data, elements, location


class Call:
    """Pickled as a call of function with arguments."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def T(storage, shape, stride=None, offset=0):
    if stride is None:
        stride, step = [], 1
        for extent in reversed(shape):
            stride.insert(0, step)
            step *= extent
    return Call(rebuild_v2, storage, offset, tuple(shape), tuple(stride), False, collections.OrderedDict())


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol, storages):
        super().__init__(file, protocol)
        self.storages = storages

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        self.storages[thing.key] = thing.data
        return ("storage", thing.kind, thing.key, thing.location, thing.elements)


class State(collections.OrderedDict):
    """A state dict: an OrderedDict with an attribute."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"_metadata": collections.OrderedDict([("", {"version": 1})])}, None, \
            iter(self.items())


def archive(entries, packed=False):
    import io
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        for name, data in entries:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            file.writestr(info, data)
    return out.getvalue()


def pt_of(pickled, storages, packed=False, extra=()):
    entries = [("model/data.pkl", pickled), ("model/byteorder", b"little")]
    entries += [("model/data/" + key, data) for key, data in storages.items()]
    return archive(entries + [("model/version", b"3\n")] + list(extra), packed)


def dumps(thing, protocol=2):
    import io
    out, storages = io.BytesIO(), {}
    Pickler(out, protocol, storages).dump(thing)
    return out.getvalue(), storages


def make_pt():
    import warnings
    warnings.simplefilter("ignore") # zipfile says what is meant: names that are there twice

    def save(name, thing, protocol=2, packed=False, extra=()):
        put("pt", name + ".pt", pt_of(*dumps(thing, protocol), packed=packed, extra=extra))

    def raw(name, pickled, storages=None):
        put("pt", name + ".pt", pt_of(pickled, storages or {}))

    weight = Storage(FloatStorage, "0", floats(1, 0, 2, 0, 0, -3), 6)
    bias = Storage(HalfStorage, "1", struct.pack("<4H", 0x3C00, 0, 0, 0x4000), 4)
    steps = Storage(LongStorage, "2", struct.pack("<q", 7), 1)
    model = State([("fc.weight", T(weight, [2, 3])), ("fc.half", T(bias, [2, 2])), ("steps", T(steps, []))])
    save("good", model)
    save("good_protocol4", model, 4)
    save("good_protocol5", model, 5)
    save("deflated", model, packed=True)
    save("nested", {"model": model, "epoch": 3, "lr": 1e-3, "on": True, "off": False, "none": None, "big": 1 << 40,
                    "minus": -5, "args": ["adam", (1, 2, 3, 4)]})
    save("transposed", {"w": T(weight, [3, 2], [1, 3])})
    save("view", {"w": T(weight, [2, 2], [3, 1], 1)})
    save("skips", {"w": T(weight, [2, 2], [3, 2])})
    save("tied", {"a": T(weight, [2, 3]), "b": T(weight, [2, 3])})
    save("bare", T(weight, [2, 3]))
    save("list", [T(weight, [2, 3]), T(bias, [2, 2])])
    save("parameter", {"w": Call(rebuild_parameter, T(weight, [2, 3]), True, collections.OrderedDict())})
    save("empty", State())
    save("v3", {"w": Call(rebuild_v3, Storage(UntypedStorage, "0", b"\x38\x40", 2), 0, (2,), (1,), False,
                          collections.OrderedDict(), float8)})
    save("bf16", {"w": T(Storage(BFloat16Storage, "0", b"\x80\x3f\0\0", 2), [1, 2])})
    put("pt", "no_directory.pt", archive([("data.pkl", dumps(model)[0])] +
                                         [("data/" + k, d) for k, d in dumps(model)[1].items()]))

    save("out_of_storage", {"w": T(weight, [2, 4])})
    save("offset_out_of_storage", {"w": T(weight, [1, 1], offset=6)})
    save("stride_overflow", {"w": T(weight, [3, 3], [1 << 62, 1 << 62])})
    save("huge_shape", {"w": T(weight, [1 << 62, 1 << 62], [0, 0])})
    save("negative", {"w": T(weight, [-1, 3])})
    save("strides_missing", {"w": T(weight, [2, 3], [3])})
    save("many_dimensions", {"w": T(weight, [1] * 40)})
    save("short_storage", {"w": T(Storage(FloatStorage, "0", floats(1, 2), 6), [2, 3])})
    save("long_storage", {"w": T(Storage(FloatStorage, "0", floats(1, 2, 3), 2), [1, 2])})
    save("quantized", {"w": T(Storage(QUInt8Storage, "0", bytes(2), 2), [1, 2])})
    save("key_number", {1.5: T(weight, [2, 3])})
    save("control_key", {"a\x1b[2J": T(weight, [2, 3])})
    save("long_name", {"x" * 5000: T(weight, [2, 3])})
    save("same_name", {"1": T(weight, [2, 3]), 1: T(weight, [2, 3])})
    shared = {"w": T(weight, [2, 3])}
    save("same_dictionary", {"a": shared, "b": shared})
    loop = []
    loop.append(loop)
    save("loop", loop)
    deep = {}
    for _ in range(40):
        deep = {"d": deep}
    save("nested_deep", deep)

    # bare pickles, which fuzz_pt.c puts into archives of its own
    for name, protocol in (("good", 2), ("good4", 4)):
        put("pt", name + ".pkl", dumps(model, protocol)[0])
    put("pt", "nested.pkl", dumps({"model": model, "list": [1, (2.5, None)], "w": T(weight, [2, 2], [3, 1], 1)})[0])

    put("pt", "mark_alone.pkl", b"(el") # found by fuzzing: items for a stack that is not there yet

    # names and opcodes that would run something, or make something else
    class System:
        def __reduce__(self):
            return os.system, ("true",)

    save("system", {"w": System()})
    save("system4", {"w": System()}, 4)
    save("eval", {"w": Call(eval, "1")})
    raw("build_tensor", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.")
    raw("reduce_string", b"\x80\x02X\x01\0\0\0a)R.")
    raw("dict_arguments", b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.")
    raw("newobj", b"\x80\x02ccollections\nOrderedDict\n)\x81.")
    raw("inst", b"(icollections\nOrderedDict\n.")
    raw("ext", b"\x80\x02\x82\x01.")
    raw("no_opcode", b"\x80\x02\xff.")
    raw("persid", b"\x80\x02P7\n.")
    raw("wrong_persid", b"\x80\x02K\x07Q.")
    raw("protocol9", b"\x80\x09}.")
    raw("no_stop", b"\x80\x02}")
    raw("nothing", b"")
    raw("stop_alone", b".")
    raw("cut_string", b"\x80\x02X\xff\xff\xff\xffab.")
    raw("cut_name", b"\x80\x02ctorch")
    raw("long_frame", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.")
    raw("memo_missing", b"\x80\x02h\x07.")
    raw("memo_skips", b"\x80\x02}r\xff\xff\xff\xff.")
    raw("no_mark", b"\x80\x02}u.")
    raw("below_mark", b"\x80\x02}(s.")
    raw("odd_items", b"\x80\x02}(K\x01u.")
    raw("append_to_dict", b"\x80\x02}K\x01a.")
    raw("huge_long", b"\x80\x02\x8a\x09" + bytes(9) + b".")
    raw("control_global", b"\x80\x02cos\x1b[2J\nsystem\n.")

    # the archive
    pickled, storages = dumps(model)
    whole = pt_of(pickled, storages)
    put("pt", "truncated.pt", whole[:-30])
    put("pt", "truncated_half.pt", whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[whole.index(floats(1, 0, 2)) + 4] ^= 1
    put("pt", "checksum.pt", bytes(damaged))
    put("pt", "no_storage.pt", pt_of(pickled, {k: d for k, d in storages.items() if k != "1"}))
    put("pt", "same_entry.pt", pt_of(pickled, storages, extra=[("model/data/0", storages["0"])]))
    put("pt", "two_pickles.pt", pt_of(pickled, storages, extra=[("other/data.pkl", pickled)]))
    put("pt", "big_endian.pt", archive([("model/data.pkl", pickled), ("model/byteorder", b"big")]))
    put("pt", "no_pickle.pt", archive([("model/version", b"3\n")]))
    put("pt", "arrays.npz", archive([("a.npy", b"\x93NUMPY")]))
    put("pt", "not_zip.pt", b"\x80\x02}q\x00.")
    put("pt", "old_format.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    # a bomb: a megabyte of zeros in a kilobyte, where the pickle says two numbers; one that claims a terabyte
    bomb = archive([("model/data.pkl", dumps({"w": T(Storage(FloatStorage, "0", floats(1, 2), 2), [1, 2])})[0]),
                    ("model/data/0", bytes(1 << 20))], packed=True)
    put("pt", "bomb.pt", bomb)
    claims = bytearray(archive([("model/data.pkl", b"\x80\x02}.")], packed=True))
    at = claims.rindex(b"PK\1\2")
    claims[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)
    put("pt", "bomb_claims.pt", bytes(claims))
    put("pt", "bomb_pickle.pt", archive([("model/data.pkl", bytes((64 << 20) + 1))], packed=True))
    lies = bytearray(pt_of(pickled, storages, packed=True))
    at = lies.rindex(b"PK\1\2", 0, lies.rindex(b"model/data/2"))
    lies[at + 24 : at + 28] = struct.pack("<I", 4) # the storage's real size is 8
    put("pt", "lies_about_size.pt", bytes(lies))


make_safetensors()
make_pt()
