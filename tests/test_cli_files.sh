#!/bin/sh
# test_cli_files.sh: what the esmm command makes of the files that people have: models in several files, tensors by
# name, pipes and devices, names that would turn a terminal's text round; what inspect promises and what it points out.
# Called by run_tests.sh with TREE and WORK set. python3 makes the files, with nothing but its standard library.
set -u
. tests/support/tap.sh

cd "$WORK" || exit 1
mkdir -p bin && ln -sf "$TREE/esmm" bin/esmm && PATH=$WORK/bin:$PATH
export XDG_CACHE_HOME="$WORK/cache" NO_COLOR=1 ESMM_DEVICE=cpu ESMM_THREADS=1
unset COLUMNS ESMM_OPENBLAS ESMM_BLIS

# ---- the command itself ----
version() { [ "$(esmm version)" = "$(esmm --version)" ] && esmm version | grep -q '^esmm [0-9]' && ! esmm version now; }
check 'esmm version says what --version says' version

if ! have python3; then
  skip 'files of models' 'there is no python3'
  finish
  exit
fi
python3 - <<'END'
import json, random, struct
def safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)
f32 = lambda values: struct.pack("<%df" % len(values), *values)
def npy(path, rows, cols, values):
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d), }" % (rows, cols)
    text += " " * (117 - len(text)) + "\n"
    open(path, "wb").write(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.encode() + f32(values))
random.seed(1)
out, into = 64, 128  # [out, in], as PyTorch has them
dense = [random.uniform(1, 2) for _ in range(out * into)]
two4 = [v if i % 4 in (0, 3) else 0 for i, v in enumerate(dense)]
blocks = [v if (i // into // 16 + i % into // 16) % 3 == 0 else 0 for i, v in enumerate(dense)]
single = [v if random.random() < .4 else 0 for v in dense]
bias = [float(i) for i in range(out)]
bf16 = b"".join(struct.pack("<f", v)[2:] for v in dense)
safetensors("part-1.safetensors", {"dense": ("F32", [out, into], f32(dense)), "half": ("BF16", [out, into], bf16),
                                   "two4": ("F32", [out, into], f32(two4))})
safetensors("part-2.safetensors", {"blocks": ("F32", [out, into], f32(blocks)), "bias": ("F32", [out], f32(bias)),
                                   "single": ("F32", [out, into], f32(single)),
                                   "left\u202etfel\u2066": ("F32", [1, 1], f32([1]))})
where = {"dense": 1, "half": 1, "two4": 1, "blocks": 2, "bias": 2, "single": 2, "left\u202etfel\u2066": 2}
index = {"metadata": {}, "weight_map": {n: "part-%d.safetensors" % w for n, w in where.items()}}
json.dump(index, open("model.safetensors.index.json", "w"))
json.dump({"weight_map": {"w": "../part-1.safetensors"}}, open("outside.index.json", "w"))
json.dump({"weight_map": {"w": "part-9.safetensors"}}, open("missing.index.json", "w"))
open("broken.index.json", "w").write('{"weight_map": [')
json.dump({"weights": {}}, open("empty.index.json", "w"))
x = [random.uniform(-1, 1) for _ in range(3 * into)]
npy("x.npy", 3, into, x)
npy("b.npy", into, out, [two4[j * into + i] for i in range(into) for j in range(out)])
npy("bias.npy", 1, out, bias)
npy("dense.npy", out, into, dense)
END

# ---- pipes and devices ----
device() { timeout 20 esmm run --a /dev/zero --b /dev/zero --dims 8 32 16 --out zero.npy && grep -q '(8, 16)' zero.npy; }
check 'a device is read only as far as the dimensions say' device
tiny() { timeout 20 esmm run --a /dev/zero --b /dev/zero --dims 1 1 1 --out zero.npy; }
check 'a device that gives less than is looked at first' tiny
endless() { # a .npy file that never ends
  { cat dense.npy && exec cat /dev/zero; } | timeout 20 esmm inspect /dev/stdin >endless.out 2>&1
  [ $? = 1 ] && grep -q 'bytes follow the 32896 that its header speaks of' endless.out || { cat endless.out; return 1; }
  head -c 100000 /dev/zero | timeout 20 esmm inspect /dev/stdin --dims 8x8 >endless.out 2>&1
  [ $? = 1 ] && grep -q 'has more bytes than raw float32 of 8 x 8, 256' endless.out || { cat endless.out; return 1; }
  head -c 4 /dev/zero | timeout 20 esmm inspect /dev/stdin --dims 8x8 >endless.out 2>&1
  [ $? = 1 ] && grep -q 'has 4 bytes, raw float32 of 8 x 8 has 256' endless.out || { cat endless.out; return 1; }
}
check 'a pipe that does not end is an error, and soon' endless
piped() { # shellcheck disable=SC2002 # it must be a pipe
  cat dense.npy | esmm inspect /dev/stdin | grep -q '^shape  *64 x 128' &&
    cat x.npy | esmm bench auto 1 --no-tune --load-a /dev/stdin --dims 3 128 8 >piped.out 2>&1 || { cat piped.out; return 1; }; }
check 'a pipe that ends where it should' piped

# ---- inspect ----
model=model.safetensors.index.json
if ! esmm info | grep -q '^safetensors  *can be read'; then
  skip 'models in several files' 'this build has no jansson'
  finish
  exit
fi
sharded() {
  esmm inspect $model >sharded.out || return 1
  for name in dense half two4 blocks single; do
    [ "$(grep -c "^$name  *64 x 128" sharded.out)" = 1 ] || { cat sharded.out; return 1; }
  done
  ! grep -q '^tensor.*file\|part-1' sharded.out && [ "$(esmm inspect $model --json - 2>/dev/null | grep -c part-2)" = 3 ]
}
check 'an index is one model' sharded
wrong_index() { # FILE TEXT
  esmm inspect "$1" >wrong.out 2>&1
  [ $? = 1 ] && grep -q -F "$2" wrong.out || { cat wrong.out; return 1; }
}
check 'an index does not lead elsewhere' wrong_index outside.index.json "'../part-1.safetensors' is no file beside the index"
check 'an index of what is not there' wrong_index missing.index.json 'part-9.safetensors: cannot be opened'
check 'an index that is no JSON' wrong_index broken.index.json 'is no JSON: line 1'
check 'an index without a map' wrong_index empty.index.json "field 'weight_map' is not there"
overrides() { esmm inspect $model | grep -q -F 'left\u202etfel\u2066' && ! esmm inspect $model | grep -q "$(printf '\342\200\256')" &&
  esmm inspect $model --json - 2>/dev/null | grep -q -F '"left\u202etfel\u2066"' &&
  esmm run --a x.npy --b "part-2.safetensors::$(printf 'no\342\200\256')" --out no.npy 2>&1 | grep -q -F "'no\\u202e'"; }
check 'bidirectional overrides are shown as escapes' overrides

nothing() { # M: no promise where nothing is zero, in any dtype
  esmm inspect $model --m "$1" >nothing.out && grep -Eq '^dense .* -$' nothing.out && grep -Eq '^half .* -$' nothing.out &&
    grep -Eq '^single .*[0-9]x$' nothing.out && grep -q 'nothing to skip' nothing.out && grep -q '^It is over OpenBLAS' nothing.out ||
    { cat nothing.out; return 1; }
}
check 'nothing is promised where nothing is zero: 1 row' nothing 1
check 'nothing is promised where nothing is zero: 1024 rows' nothing 1024
one_row() { esmm inspect $model --m 1 | grep -q 'a dense A of 1 row, 1 thread,'; }
check 'one row is a row' one_row
nothing_npy() { esmm inspect dense.npy >nothing.out && grep -q '^Nothing is zero here' nothing.out && grep -q '^dense: OpenBLAS' nothing.out &&
  ! grep -q '^as .*x$' nothing.out || { cat nothing.out; return 1; }; }
check 'nothing is promised of a matrix without zeros' nothing_npy
patterns() {
  esmm inspect $model >patterns.out
  grep -q '^two4 is of 2:4 along k (--format nm:2:4)' patterns.out && grep -q '^blocks is of blocks of 16 x 16 (--format bsr:16)' patterns.out &&
    [ "$(grep -c ' is of \| are of ' patterns.out)" = 2 ] && esmm inspect b.npy | grep -q '^Pattern as B: 2:4 along k' &&
    ! esmm inspect dense.npy | grep -q '^Pattern' || { cat patterns.out; return 1; }
}
check 'inspect points out 2:4 and blocks' patterns
# ---- run ----
named() { # the same product from tensors and from .npy files
  esmm run --a x.npy --b b.npy --bias bias.npy --out plain.npy >/dev/null &&
    esmm run --a x.npy --b part-1.safetensors::two4 --bias part-2.safetensors::bias --out named.npy >/dev/null && cmp plain.npy named.npy &&
    esmm run --a x.npy --b $model::two4 --bias $model::bias --out named.npy >/dev/null && cmp plain.npy named.npy
}
check 'run takes FILE::TENSOR, of an index too' named
first() { esmm run --a b.npy --b part-1.safetensors::two4 --k-axis first --out first.npy | grep -q '128 x 128'; }
check 'run takes --k-axis' first
unfit() { # ARGUMENTS: TEXT is $1
  text=$1
  shift
  esmm run --out unfit.npy "$@" >unfit.out 2>&1
  [ $? = 1 ] && grep -q -F "$text" unfit.out || { cat unfit.out; return 1; }
}
check 'run says which tensor has another shape' unfit 'is 128 x 64 as B, not 128 x 65' --a x.npy --b $model::two4 --dims 3 128 65
check 'run says that a tensor is not there' unfit "has no tensor 'nobody'" --a x.npy --b $model::nobody
check 'run wants a name of an index' unfit 'name a tensor, as in' --a x.npy --b $model

# ---- tables ----
fits() { # COLUMNS COMMAND...
  fits_columns=$1
  shift
  COLUMNS=$fits_columns "$@" 2>/dev/null | awk -v most="$fits_columns" '
    /^(A |B |auto|dense|weights|check|machine|Densities|Speedup|It is over|k is|Where|Predicted|dense:|Strip density|All of them)/ { next }
    { if (length($0) > most) { print; bad = 1 } } END { exit bad || NR == 0 }'
}
check 'a table fits 80 columns: inspect' fits 80 esmm inspect $model
check 'a table fits 80 columns: bench' fits 80 esmm bench auto 1 --no-tune --size 64
check 'a table fits 100 columns: list' fits 100 esmm list
parts() { COLUMNS=60 esmm inspect $model | awk '/^tensor/ { heads++ } /^two4 / { rows++ } END { exit heads < 2 || rows != heads + 1 }'; }
check 'columns that do not fit follow below, each with its row' parts
tunes_a_model() { # a matrix of each shape and dtype; later runs know what its products take
  rm -rf tuned && mkdir tuned
  XDG_CACHE_HOME=$PWD/tuned esmm tune part-1.safetensors --rows 96,200 --density-a 1,5% --threads 1 >tuned.out 2>&1 &&
    [ "$(grep -c '^dense ' tuned.out)" = 4 ] && grep -q '12 products timed with 1 thread, and saved' tuned.out || { cat tuned.out; return 1; }
  XDG_CACHE_HOME=$PWD/tuned esmm explain --load-b part-1.safetensors::dense --dims 96 128 64 --random --density-a 5% \
    --threads 1 >tuned.out 2>&1 && grep -q '^\* .*cheapest of .* as measured' tuned.out || { cat tuned.out; return 1; }
  esmm tune part-1.safetensors --dry-run 2>tuned.out
  [ $? = 2 ] && grep -q 'dry-run is for the machine' tuned.out || { cat tuned.out; return 1; }
  esmm tune --rows 3 2>tuned.out
  [ $? = 2 ] && grep -q 'are for a model: give its file' tuned.out || { cat tuned.out; return 1; }
}
check 'tune of a model' tunes_a_model
weights() { mkdir -p only && cp part-1.safetensors only/ && esmm bench-weights only --m 4 --no-tune >weights.csv 2>&1 &&
  [ "$(grep -c ',auto,' weights.csv)" = 3 ] && [ "$(wc -l <weights.csv)" = 4 ] || { cat weights.csv; return 1; }; }
check 'bench-weights measures auto' weights

finish
