#!/bin/sh
# test_examples.sh: the programs of examples/, run briefly. Called by run_tests.sh with TREE and WORK set.
set -u
. tests/support/tap.sh

train=$TREE/examples/ffn_train infer=$TREE/examples/ffn_inference

check 'examples build' "$MAKE" --no-print-directory BUILD="$TREE" WERROR=1 examples

learns() { "$train" --steps 250 --out "$WORK/curve" --save "$WORK/model.safetensors" >"$WORK/out" 2>"$WORK/progress"; }
check 'ffn_train runs' learns

# The last loss of each mode, from the CSV.
loss() { awk -F, -v mode="$1" '$1 == mode { loss = $3 } END { print loss + 0 }' "$WORK/curve.csv"; }
first_loss() { awk -F, -v mode="$1" '$1 == mode && $2 == 0 { print $3 }' "$WORK/curve.csv"; }
close_to_dense() {
  awk -v a="$(loss exact)" -v b="$(loss dense)" 'BEGIN { print a, b; exit !(b > 0 && a > 0.95 * b && a < 1.05 * b) }'
}
check "exact reaches dense's loss within 5 %" close_to_dense
learned() { awk -v a="$(loss "$1")" -v b="$(first_loss "$1")" 'BEGIN { print a, b; exit !(a > 0 && a < b / 50) }'; }
check 'exact learns' learned exact
check 'split learns' learned split
drops() {
  awk -F, 'NR > 1 && $7 != 0 { if ($1 == "split") mine++; else others++ } END { exit !(mine > 0 && !others) }' "$WORK/curve.csv"
}
check 'only split drops anything' drops

picture() { grep -q '</svg>' "$WORK/curve.svg" && [ "$(grep -c '<polyline' "$WORK/curve.svg")" = 9 ]; }
check 'three panels of three curves in the picture' picture
printed() { [ "$(grep -c '^split *step [0-9]*  loss [0-9.]*  nonzero' "$WORK/progress")" -ge 4 ]; }
check 'progress on stderr' printed

for sparsifier in top soft mvue; do
  sparse() { "$train" --mode sparse --sparsifier $sparsifier --steps 60 --out "$WORK/$sparsifier" >"$WORK/out" 2>&1; }
  check "ffn_train --mode sparse --sparsifier $sparsifier" sparse
done

refuses() { # WORDS...: status 2, and a text
  "$train" "$@" >"$WORK/out" 2>"$WORK/error"
  [ $? = 2 ] && grep -q ffn_train "$WORK/error"
}
check 'ffn_train refuses an unknown option' refuses --banana 3
check 'ffn_train refuses a bad number' refuses --steps 3x
check 'ffn_train refuses an unknown mode' refuses --mode fast
check 'ffn_train refuses half a step' refuses --steps 1.9
check 'ffn_train refuses a fifth mode' refuses --mode dense --mode exact --mode split --mode sparse --mode dense
check 'ffn_train refuses one name for two files' refuses --steps 2 --out "$WORK/twice" --save "$WORK/twice.csv"
early() { # a million steps would take hours
  timeout 20 "$train" --steps 1000000 --mode exact "$@" 2>"$WORK/error"
  [ $? = 1 ] && grep -q 'no/such' "$WORK/error"
}
check 'ffn_train tries --out before it trains' early --out "$WORK/no/such/place"
check 'ffn_train tries --save before it trains' early --out "$WORK/tried" --save "$WORK/no/such/place"
full() { ! "$@" >/dev/full 2>"$WORK/error" && grep -q 'cannot write to the standard output' "$WORK/error"; }
check 'ffn_train says that its output did not arrive' full "$train" --steps 2 --mode exact --out "$WORK/full"
wrong_words() { # WORDS...: status 2 and the usage
  "$TREE/examples/ffn_speed" "$@" >"$WORK/out" 2>"$WORK/error"
  [ $? = 2 ] && grep -q '^usage: ffn_speed' "$WORK/error"
}
check 'ffn_speed refuses two numbers' wrong_words 8 8
check 'ffn_speed refuses five numbers' wrong_words 8 8 8 1 1
check 'ffn_speed refuses a number with a letter' wrong_words 8 8x 8
check 'ffn_speed refuses an unknown option' wrong_words --banana
speed_help() { "$TREE/examples/ffn_speed" --help | grep -q '^usage: ffn_speed'; }
check 'ffn_speed has --help' speed_help
gpu_words() {
  "$TREE/examples/ffn_speed_gpu" "$@" >"$WORK/out" 2>"$WORK/error"
  [ $? = 2 ] && grep -q '^usage: ffn_speed_gpu' "$WORK/error"
}
check 'ffn_speed_gpu refuses two numbers' gpu_words 8 8
check 'ffn_speed_gpu refuses a number with a letter' gpu_words 8 8x 8
gpu_help() { "$TREE/examples/ffn_speed_gpu" --help | grep -q '^usage: ffn_speed_gpu'; }
check 'ffn_speed_gpu has --help' gpu_help
no_directory() {
  ! "$train" --steps 2 --mode exact --out "$WORK/no/such/place" 2>"$WORK/error" && grep -q 'no/such' "$WORK/error"
}
check 'ffn_train says which file it cannot write' no_directory

if "$infer" "$WORK/model.safetensors" >"$WORK/out" 2>&1; then
  alive() { grep -E '^[1-9][0-9]* of 256 features alive, [0-9.]+ % of the hidden layer nonzero' "$WORK/out"; }
  check 'ffn_inference with the trained weights' alive
  check 'ffn_inference says that its output did not arrive' full "$infer" "$WORK/model.safetensors"
  no_width() { # no elements, and 2^62 columns
    header='{"fc1.weight":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]},"fc1.bias":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    header=$header'"fc2.weight":{"dtype":"F32","shape":[0,0],"data_offsets":[0,0]},"fc2.bias":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    printf "\\$(printf %03o $((${#header} % 256)))\\$(printf %03o $((${#header} / 256)))\\0\\0\\0\\0\\0\\0%s" "$header" >"$WORK/wide.safetensors"
    "$infer" "$WORK/wide.safetensors" 2>"$WORK/error"
    [ $? = 1 ] && grep -q 'd_model is 4611686018427387904' "$WORK/error" || { cat "$WORK/error"; return 1; }
  }
  check 'ffn_inference refuses a width that cannot be' no_width
elif grep -q jansson "$WORK/out"; then
  skip 'ffn_inference with the trained weights' 'built without jansson, which reads safetensors'
else
  not_ok 'ffn_inference with the trained weights' <"$WORK/out"
fi
speed() { [ "$("$TREE/examples/ffn_speed" 40 24 96 2 | grep -c '^| .* | [0-9.]* | [0-9.]* |$')" = 19 ]; }
check 'ffn_speed prints a line for each hidden layer' speed
speed_gpu() {
  "$TREE/examples/ffn_speed_gpu" 40 24 96 cpu >"$WORK/out" &&
    [ "$(grep -c '"step_times_dense":[0-9.]*}$' "$WORK/out")" = 24 ] &&
    [ "$(grep -c 'gated decode, 10 % active, m = 1*[146]","mode":"[a-z]*",.*"apart_times_dense":[0-9.]*}$' "$WORK/out")" = 12 ]
}
check 'ffn_speed_gpu prints a line for each mode and hidden layer, and for few tokens' speed_gpu
no_model() { ! "$infer" "$WORK/curve.csv" 2>"$WORK/error" && grep -q 'curve.csv' "$WORK/error"; }
check 'ffn_inference names a file that is no model' no_model

# Two ranks on one machine; root, as in a container, has to say that it means it.
if have mpicc && have mpirun; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  split() { # RANKS WORDS...
    ranks=$1
    shift
    timeout 60 mpirun -n "$ranks" "$TREE/examples/ffn_mpi" "$@" >"$WORK/out" 2>&1
  }
  same() { split "$@" && grep -q 'the same within rounding$' "$WORK/out" || { cat "$WORK/out"; return 1; }; }
  check 'ffn_mpi with two ranks' same 2
  check 'ffn_mpi with three ranks that hold parts of different sizes' same 3 33 40 77
  mpi_refuses() { ! split 2 "$@" && grep -q "$said" "$WORK/out"; }
  said='usage: mpirun' check 'ffn_mpi refuses a number with a letter' mpi_refuses 8 8x 8
  said='at least the number of ranks' check 'ffn_mpi refuses more ranks than columns' mpi_refuses 8 8 1
else
  skip 'ffn_mpi with two ranks' 'mpicc or mpirun is not installed'
fi
finish
