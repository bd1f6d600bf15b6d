#!/bin/sh
# random_products.sh: random small products through `esmm bench auto`, all of which must be called right.
#
#   sh tests/random_products.sh [ESMM [COUNT [SEED]]]    build/esmm, 40 of them, from seed 1; a line for each that is not right
#
# Whether the same check sees a broken product is tests/test_bench_check.c's to say.
set -u
esmm=${1:-build/esmm} count=${2:-${ESMM_TEST_PRODUCTS:-40}} seed=${3:-1}
awk -v count="$count" -v seed="$seed" '
  function size(most) { return int(exp(rand() * log(most + 1))) }
  function density(    all) { split(".01 .1 .3 .5 .9", all, " "); return all[1 + int(5 * rand())] }
  BEGIN {
    srand(seed)
    for (i = 0; i < count; i++) {
      words = "--dims " size(64) " " size(4096) " " size(64) " --threads " (rand() < .25 ? 2 : 1) " --seed " int(1e6 * rand())
      kind = int(3 * rand())
      if (kind == 0) words = words " --dense"
      if (kind == 1) words = words " --random --density-a " density()
      if (kind == 2) words = words " --blockwise --strip " (1 + int(64 * rand())) " --density-a " density()
      if (rand() < .3) words = words " --dtype-c " (rand() < .5 ? "bf16" : "f16")
      print words
    }
  }' | {
  wrong=0
  while read -r words; do
    # shellcheck disable=SC2086
    if said=$("$esmm" bench auto 1 --no-tune $words 2>&1 </dev/null) && ! echo "$said" | grep -q 'WRONG'; then continue; fi
    wrong=$((wrong + 1))
    echo "esmm bench auto 1 --no-tune $words"
    echo "$said" | grep -E 'WRONG|esmm:' | sed 's/^/  /'
  done
  echo "$count products, $wrong of them not right"
  [ $wrong = 0 ]
}
