# tables.awk: the tables and sentences of README.md and docs/PERFORMANCE.md, from the records of a CPU and of a GPU.
# tables.sh runs it, with json.awk. Block NAME, a table and the text below it, goes to the file `blocks`/NAME.
#
# A block may start with a heading of its own: a record without the suites that fill it then leaves nothing behind.
#
# A table is a grid. put() fills cells; rows and columns keep the order in which they first come. The > at the end of a
# column's name aligns it to the right; | within a row's name or title starts another column.

function fail(text) { print "tables.awk: " FILENAME ":" FNR ": " text > "/dev/stderr"; failed = 1; exit 1 }
function need(key,   x) { x = value(key); if (x == "") fail("there is no " key); return x }

function percent(x) { return sprintf("%.3g %%", 100 * x) }
function times(x) { return sprintf(x >= 9.95 ? "%.1f" : "%.2f", x) }
function ms(x) { return sprintf(x >= 9.995 ? "%.1f" : x >= 0.0995 ? "%.3f" : "%.4f", x) }
function product(   m, n, k) {
  m = need("m"); n = need("n"); k = need("k")
  return m == n && n == k ? m "³" : m " × " n ", k " k
}

function put(table, row, columns, texts,   name, text, i, n) {
  if (!(table in title))
    fail("no title for the table " table)
  if (!((table, row) in row_known))
    row_name[table, row_known[table, row] = ++rows[table]] = row
  n = split(columns, name, "|")
  split(texts, text, "|")
  for (i = 1; i <= n; i++) {
    if (!((table, name[i]) in column_known))
      column_name[table, column_known[table, name[i]] = ++columns_of[table]] = name[i]
    cell[table, row, name[i]] = text[i]
  }
}
function write_table(table, file,   head, rule, name, n, i, j, line) {
  head = title[table]
  for (j = 1; j <= columns_of[table]; j++)
    head = head "|" column_name[table, j]
  n = split(head, name, "|")
  head = rule = "|"
  for (j = 1; j <= n; j++) {
    rule = rule (sub(/>$/, "", name[j]) ? " ---: |" : " --- |")
    head = head " " name[j] " |"
  }
  print head "\n" rule > file
  for (i = 1; i <= rows[table]; i++) {
    line = row_name[table, i]
    gsub(/\|/, " | ", line)
    line = "| " line " |"
    for (j = 1; j <= columns_of[table]; j++)
      line = line " " cell[table, row_name[table, i], column_name[table, j]] " |"
    print line > file
  }
}
function write_text(text, file,   words, n, i, line) { # in lines of at most 120 characters
  n = split(text, words, " ")
  for (i = 1; i <= n; i++)
    if (length(line) + 1 + length(words[i]) > 120) {
      print line > file
      line = words[i]
    } else
      line = line (i > 1 ? " " : "") words[i]
  print line > file
}

# The share of nonzeros above which gain[curve, density] is below 1, between the two densities measured beside it.
function dense_wins(curve,   key, part, d, low, high) {
  for (key in gain)
    if (split(key, part, SUBSEP) && part[1] == curve && gain[key] >= 1 && part[2] + 0 > low)
      low = part[2] + 0
  for (key in gain)
    if (split(key, part, SUBSEP) && part[1] == curve && part[2] + 0 > low && (high == "" || part[2] + 0 < high))
      high = part[2] + 0
  if (high == "")
    return low == "" ? "(not measured)" : "at no share up to " percent(low)
  if (low == "")
    return "already at " percent(high)
  d = gain[curve, low] - gain[curve, high]
  return sprintf("above %.0f %%", 100 * (low + (high - low) * (gain[curve, low] - 1) / d))
}
function most(list, key, x) { if (!(key in list) || x > list[key]) list[key] = x }
function least(list, key, x) { if (!(key in list) || x < list[key]) list[key] = x }

# ---- lines of a record ----

function summary(zeros) {
  put("summary", on "|" zeros, "product|nonzeros>|dense library ms>|ESMM ms>|times faster>",
    product() ", " dtype "|" percent(suite == "real16" ? value("density_a") : asked) "|" ms(baseline) "|" ms(t) "|" \
    times(speedup))
}
function chosen(table, row) {
  put(table, row, "kernel chosen|ms>|cuBLAS ms>|times faster>|scan of A>|error over cuBLAS's>",
    kernel "|" ms(t) "|" ms(baseline) "|" times(speedup) "|" percent_of(extract, t) "|" sprintf("%.2f", ratio))
}
function percent_of(part, all) { return part > 0 ? sprintf("%.1f %%", 100 * part / all) : "" }
function grid(table, row) { put(table, row, percent(asked) ">", times(speedup)) }

# A row of the table that `make run` prints: four digits of a time, three of the scan.
function digits(x, n) { return sprintf("%." (x >= 10 ? n - 2 : x >= 1 ? n - 1 : x >= .1 ? n : n + 1) "f", x) }
function run_line(   library) {
  library = need("baseline")
  sub(/_on_random$/, "", library)
  run_rows = run_rows sprintf("%5.1f %%  %-24s %6s  %7s  %8s  %5.2f x  %7.1e  %s\n", 100 * asked, "auto: " kernel,
    digits(t, 4), digits(extract, 3), digits(baseline, 4), speedup, need("rel_err"), library)
}

function cpu_line(   row) {
  if (suite ~ /^bf16/) # in the record, and in no table
    return
  if (suite == "blockwise" && need("m") == 1024 && (asked == 1 || asked == .75 || asked == .25))
    run_line()
  most(worst, "cpu", ratio)
  if (suite ~ /^over/)
    most(gain, suite SUBSEP asked, speedup)
  else if (suite == "activations")
    put("cpu-activations", need("asked") "|" product(), "nonzeros>|kernel chosen|ms>|library ms>|times faster>",
      percent(value("density_a")) "|" kernel "|" ms(t) "|" ms(baseline) "|" times(speedup))
  else {
    row = suite == "blockwise" ? "strips of 32 in A and B" : suite == "strips16" ? "strips of 32 in A, bf16" : \
      "anywhere in A" (suite == "decode" ? ", few rows" : "")
    row = row "|" product()
    least(fastest, row, baseline)
    put("cpu", row, "library ms>", ms(fastest[row]))
    grid("cpu", row)
  }
  if (suite == "blockwise" && need("m") == 2048 && (asked == 1 || asked == .125))
    summary(asked == 1 ? "none" : "strips of 32 in A and B")
  if (suite == "unstructured" && asked == .1)
    summary("anywhere in A")
  if (suite == "decode" && need("m") == 1 && asked == .1)
    summary("anywhere in A, one row")
}

function gpu_line() {
  if (kernel !~ /^(cublas|ladder)/)
    most(worst, suite == "long-k" ? suite : "fp32", ratio)
  if (suite == "blockwise" || suite == "over") {
    if (!automatic)
      took[kernel ~ /^joint/ ? "joint" : "own", asked] = t
    least(took, "cublas" SUBSEP asked, baseline)
  }
  if (suite == "blockwise" && automatic)
    chosen("gpu", percent(asked))
  if (suite == "long-k" && automatic)
    chosen("gpu-long-k", percent(asked))
  if (suite == "long-k" && kernel ~ /^dense/)
    put("gpu-long-k", percent(asked), "our dense kernel>", times(speedup))
  if ((suite == "sizes" || suite == "blockwise") && automatic && (asked == .5 || asked == .25))
    put("gpu-sizes", product(), percent(asked) ">|scan of A at " percent(asked) ">",
      times(speedup) "|" percent_of(extract, t))
  if (suite ~ /^only-/)
    grid("gpu-one-operand", suite == "only-a" ? "only A" : "only B")
  if (suite == "ladder")
    put("gpu-ladder", (value("number") > 0 ? value("number") : "") "|" kernel,
      "ms>|extract>|multiply>|times cuBLAS>|error over cuBLAS's>",
      ms(t) "|" ms(extract) "|" ms(t - extract) "|" times(speedup) "|" sprintf("%.2f", ratio))
  if (suite == "blockwise" && automatic && asked == .125)
    summary("strips of 32 in A and B")
  if (suite == "long-k" && automatic && asked == 1)
    summary("none, long k")
}

# A product of the sweep: what auto took, and the best of all that it could have taken.
function sweep_line(   key) {
  key = product() " at " percent(asked)
  if (!(key in best) || baseline < best[key]) {
    best[key] = baseline
    best_kernel[key] = "cuBLAS"
  }
  if (t < best[key]) {
    best[key] = t
    best_kernel[key] = kernel
  }
  if (!automatic) {
    rivals = 1
    return
  }
  grid("gpu16-sweep", product())
  swept_key[++swept] = key
  swept_auto[key] = t
  swept_kernel[key] = kernel
  swept_base[key] = baseline
  swept_first[key] = value("ms_first") + 0
  swept_sparse[key] = need("m") + 0 >= 16 && asked >= .05 && asked <= .5
  least(lowest, suite, speedup)
  if (speedup == lowest[suite])
    lowest_at = product() " at " percent(asked) ", where it took " kernel
}
function best_row(row, sparse,   i, key, share, n, over, most_over, sum, worst_share, under, under_base) {
  worst_share = 1
  for (i = 1; i <= swept; i++) {
    key = swept_key[i]
    if (sparse && !swept_sparse[key])
      continue
    share = best[key] / swept_auto[key]
    n++
    over += log(swept_base[key] / swept_auto[key])
    most_over += log(swept_base[key] / best[key])
    sum += log(share)
    under += share < .97
    under_base += swept_base[key] / swept_auto[key] < .97
    if (share <= worst_share) {
      worst_share = share
      furthest = key
    }
  }
  if (n)
    put("gpu16-best", row, "number>|`auto` over cuBLAS>|the best over cuBLAS>|`auto` over the best>|at its worst>|" \
      "below 0.97 of the best>|below 0.97 of cuBLAS>", n "|" times(exp(over / n)) "|" times(exp(most_over / n)) "|" \
      sprintf("%.3f|%.3f", exp(sum / n), worst_share) "|" (under + 0) "|" (under_base + 0))
}
function best_of_all(   i, key, n, sum, ratio_first, worst_first, worst_first_at) {
  best_row("16 rows and more, 5 to 50 %", 1)
  best_row("all", 0)
  text["gpu16-best"] = "Furthest from the best: " furthest ", where it took " swept_kernel[furthest] " and " \
    best_kernel[furthest] " is the fastest."
  for (i = 1; i <= swept; i++) {
    key = swept_key[i]
    if (swept_first[key] <= 0)
      continue
    ratio_first = swept_first[key] / swept_auto[key]
    n++
    sum += log(ratio_first)
    if (ratio_first > worst_first) {
      worst_first = ratio_first
      worst_first_at = key
    }
  }
  if (n)
    text["gpu16-best"] = text["gpu16-best"] " A first call, which knows nothing of A yet, takes " \
      times(exp(sum / n)) " times as long as a later one in the geometric mean, " times(worst_first) \
      " times at most (" worst_first_at ")."
}

function storm_line(   zeros) {
  zeros = need("generator") ", A " percent(value("density_a")) ", B " percent(value("density_b"))
  stormed++
  storm_sum += log(speedup)
  least(lowest, suite, speedup)
  if (speedup == lowest[suite])
    storm_worst = product() " (" dtype ", " zeros "), where it took " kernel
  if (speedup >= .95)
    return
  storm_below++
  put("gpu-storm", need("line") "|" product() "|" dtype "|" zeros, "kernel chosen|ms>|cuBLAS ms>|times faster>",
    kernel "|" ms(t) "|" ms(baseline) "|" times(speedup))
}

# Streams of calls: neither has a time of one call.
function switch_line(   turning) {
  turning = "turns from dense to " percent(need("asked")) " and back every " need("switch_every") " calls"
  put("gpu-switch", product() "|" turning, "the best for it|its ms>|`auto` ms>|`auto` over it>",
    need("best_dense") ", " need("best_sparse") "|" ms(need("ms_best")) "|" ms(need("ms_auto")) "|" \
    sprintf("%.3f", need("switch_ratio")))
  put("gpu-switch", product() "|stays dense", "the best for it|its ms>|`auto` ms>|`auto` over it>",
    "cuBLAS|" ms(need("ms_baseline_dense")) "|" ms(need("ms_auto_dense")) "|" sprintf("%.3f", need("dense_ratio")))
}
function calls_line() {
  put("cpu-calls", product() "|" dtype "|" need("threads"), "kernel chosen|ns a call, median>|least>",
    kernel "|" sprintf("%.0f", need("host_ns")) "|" sprintf("%.0f", need("host_ns_min")))
}
function host_line() {
  put("gpu-host", product() "|" percent(need("asked")), "kernel chosen|us a call, of the host>",
    kernel "|" sprintf("%.2f", need("host_ns") / 1000))
}

# Weights in a format of their own: what `auto` takes, over cuBLAS with the dense ones.
function peer_time(name,   x) { x = value(name); return x == "" || x == "null" ? "" : ms(x) }
function weights_line(   block, zeros) {
  most(worst, "16", ratio)
  block = need("format")
  zeros = value("density_a") < .99 ? percent(value("strip128_density_a")) " in strips" : "dense"
  if (index($0, "\"peer_ms\":") && (peer_time("cusparselt") peer_time("cusparse_bsr") peer_time("cusparse_csr")) != "")
    put("gpu16-peers", product() "|" block "|" percent(asked), "ESMM ms>|cuBLAS ms>|cuSPARSELt ms>|cuSPARSE BSR ms>|" \
      "cuSPARSE CSR ms>", ms(t) "|" ms(baseline) "|" peer_time("cusparselt") "|" peer_time("cusparse_bsr") "|" \
      peer_time("cusparse_csr"))
  if (suite == "nm24") {
    put("gpu16-nm", product(), "kernel chosen|ms>|cuBLAS ms>|times faster>",
      kernel "|" ms(t) "|" ms(baseline) "|" times(speedup))
    grouped++
    least(lowest, suite, speedup)
    if (speedup == lowest[suite])
      grouped_worst = product() ", where it took " kernel
    if (need("m") == 8192 && need("n") == 8192)
      summary("2:4 in B")
    return
  }
  sub(/^bsr:/, "", block)
  grid("gpu16-bsr", product() "|" block "|" zeros)
  if (need("m") == 8192 && block == 128 && asked == .22 && zeros == "dense")
    summary("blocks of 128 in B")
}
# Beside the plain product of the same size, which comes before it; with a gate, beside two of them.
function epilogue_line(   ends, gated) {
  ends = value("epilogue")
  if (ends == "null" || ends == "") {
    plain[product()] = t
    return
  }
  gated = ends ~ /gate/
  gsub(/,/, ", ", ends)
  put("gpu16-epilogue", product() "|" ends, "kernel chosen|ms>|over our plain product>|cuBLAS, plain ms>|times faster>",
    kernel "|" ms(t) "|" (product() in plain ? sprintf("%.3f", t / plain[product()] / (gated ? 2 : 1)) : "") "|" \
    ms(baseline) "|" times(speedup))
}
# The product that looks for A's zeros comes first, then the one that was handed its bitmaps.
function given_line(   to_it) {
  to_it = value("given") != "" && value("given") != "null"
  put("gpu16-given", product() "|" percent(asked), to_it ? "bitmaps given, ms>|cuBLAS ms>|times faster>" : \
    "kernel chosen|A looked at, ms>", to_it ? ms(t) "|" ms(baseline) "|" times(speedup) : kernel "|" ms(t))
}
function prepare_line() {
  put("gpu16-prepare", need("k") " × " need("n") "|" need("format"), "prune ms>|prepare ms>",
    ms(need("ms_prune")) "|" ms(need("ms_prepare")))
}

function gpu16_line(   columns, texts) {
  if (kernel !~ /^cublas/)
    most(worst, suite == "error16" ? suite : "16", ratio)
  columns = "kernel chosen|ms>|cuBLAS ms>|times faster>"
  texts = kernel "|" ms(t) "|" ms(baseline) "|" times(speedup)
  if (suite == "dense16" && automatic)
    put("gpu16-dense", product() "|" dtype, "cuBLAS ms>|`auto` takes|`auto` ms>|times faster>",
      ms(baseline) "|" kernel "|" ms(t) "|" times(speedup))
  else if (suite == "dense16" && kernel !~ /^cublas/)
    put("gpu16-dense", product() "|" dtype, "our dense kernel>", times(speedup))
  else if (suite == "strips16" || suite == "joint16" || (suite == "decode16" && need("m") == 1))
    grid("gpu16-" substr(suite, 1, length(suite) - 2), product() "|" (automatic ? "`auto`" : kernel))
  else if (suite == "decode16" && automatic)
    put("gpu16-few-rows", product() "|" need("asked"), "nonzeros>|k's some row needs>|" columns,
      percent(value("density_a")) "|" percent(value("strip128_density_a")) "|" texts)
  else if (suite == "real16" && automatic)
    put("gpu16-trained", need("asked") "|" product(), "nonzeros>|in strips of 128>|" columns,
      percent(value("density_a")) "|" percent(value("strip128_density_a")) "|" texts)
  else if (suite == "real16" && kernel ~ /^joint/)
    put("gpu16-trained", need("asked") "|" product(), "joint forced>", times(speedup))
  else if (suite == "random16")
    put("gpu16-anywhere", product() "|" percent(asked), columns, texts)
  else if (suite == "sweep16")
    sweep_line()
  if (suite == "dense16" && automatic) {
    least(lowest, suite, speedup)
    if (speedup == lowest[suite])
      summary("none, the worst 16-bit case")
  }
  if (suite == "strips16" && automatic && need("m") == 8192 && asked == .125)
    summary("strips of 128 in A")
  if (suite == "decode16" && automatic && need("m") == 1 && need("k") == 14336 && asked == .1)
    summary("anywhere in A, one row")
  if (suite == "real16" && automatic && need("m") == 8192 && need("n") == 3072 && need("asked") ~ /1$/)
    summary("of a trained net, early layer")
}

BEGIN {
  title["summary"] = "|zeros"
  title["cpu"] = "zeros|product"
  title["cpu-activations"] = "layers|product"
  title["cpu-calls"] = "product|dtype|threads>"
  title["gpu"] = title["gpu-long-k"] = "nonzeros>"
  title["gpu-sizes"] = "times faster, by size"
  title["gpu-one-operand"] = "sparse"
  title["gpu-ladder"] = "number>|kernel"
  title["gpu16-dense"] = "product|dtype"
  title["gpu16-strips"] = title["gpu16-joint"] = title["gpu16-decode"] = "product|kernel"
  title["gpu16-few-rows"] = "product|activations"
  title["gpu16-anywhere"] = "product|nonzeros>"
  title["gpu16-trained"] = "activations|product"
  title["gpu16-sweep"] = "product"
  title["gpu16-best"] = "products"
  title["gpu16-bsr"] = "product|block>|A"
  title["gpu16-nm"] = "product"
  title["gpu16-peers"] = "product|format|nonzeros of B>"
  title["gpu16-epilogue"] = "product|epilogue"
  title["gpu16-given"] = "product|nonzeros of A>"
  title["gpu16-prepare"] = "B|format"
  title["gpu-storm"] = "line>|product|dtype|zeros"
  title["gpu-switch"] = "product|A"
  title["gpu-host"] = "product|nonzeros>"
  head["cpu-calls"] = "### What a call costs\n\nSmall products, without zeros, call after call on the same operands: " \
    "what `auto` takes once the plan knows them."
  head["gpu16-best"] = "### `auto` against the best of all\n\nThe same products, with every kernel that could have " \
    "run forced beside `auto`: our dense kernel, joint, fused\nup to 1024 rows, decode up to 16, and cuBLAS. Figures are of speed, so 1 is as fast; means are geometric."
  head["gpu-storm"] = "### Random products\n\nSizes from 1 up, odd ones too, bf16, fp16 and fp32, zeros anywhere, " \
    "in strips or as in activations."
  head["gpu16-bsr"] = "### Weights in blocks\n\nbf16, B in format BSR: times faster than cuBLAS with the dense B, by " \
    "the share of blocks that are kept."
  head["gpu16-nm"] = "### Weights of 2:4\n\nbf16, B in format N:M, A dense; beside cuBLAS with the dense B."
  head["gpu16-peers"] = "### Beside other libraries for sparse weights\n\nThe same products and data, in the same " \
    "process; their formats of B are made beforehand, as ours are. Empty: that\nlibrary has no such product, or was " \
    "not there."
  head["gpu16-epilogue"] = "### Epilogues\n\nbf16, without zeros. cuBLAS multiplies only, twice with a gate; what it " \
    "would need for the rest is not in its time.\n*Over our plain product* is of time: with a gate over two of them."
  head["gpu16-given"] = "### Bitmaps handed over\n\nbf16, A sparse by strips of 128, B dense. The product whose C is A " \
    "has left A's bitmaps on the GPU (`c_pattern`); this\none is given them (`a_pattern`), looks for no zeros and takes no " \
    "sample."
  head["gpu16-prepare"] = "### Making weights\n\nA dense bf16 B in the GPU's memory, pruned and prepared there."
  head["gpu-switch"] = "### Where A changes\n\nA stream of calls with the same weights, bf16. Figures are " \
    "of time, ms of a call: at 1.00 `auto` is as fast as if it\nhad known each A before."
  head["gpu-host"] = "### Host time\n\nWhat a call of `auto` costs the host once the plan knows it, bf16. The GPU " \
    "works meanwhile."
  for (size = 1024; size <= 16384; size *= 2) # the record has 4096 first
    put("gpu-sizes", size "³", "", "")
}
{
  suite = need("suite"); asked = suite == "ffn16" ? 0 : need("asked") + 0; kernel = need("kernel"); automatic = need("requested") == "auto"
  dtype = need("dtype")
  on = need("device") == "cpu" ? "CPU" : "GPU"
  sub(/^f/, "fp", dtype)
  if (FNR == 1)
    threads = value("threads")
  what = need("device_name") " (" need("features") ", " \
    (on == "CPU" ? (suite == "calls" ? threads : need("threads")) " threads" : "driver " need("driver")) "), " \
    need("libraries") ", " need("date") ", source `" need("source_id") "`"
  if (FNR == 1)
    record[on] = what
  if (what != record[on])
    fail("not of the same build, machine and day as the first line")
}
suite == "switch" { switch_line(); next }
suite == "host" { host_line(); next }
suite == "calls" { calls_line(); next }
suite == "prepare16" { prepare_line(); next }
suite == "ffn16" { next } # in no table: docs/ffn.md quotes it
suite ~ /^(peers16|sizes16|ceilings|layers|cut)$/ { next } # docs/report.md has them
{
  t = need("ms") + 0; extract = need("ms_extract") + 0; baseline = need("ms_baseline") + 0
  speedup = need("speedup") + 0
  ratio = need("rel_err_baseline") + 0 > 0 ? value("rel_err") / value("rel_err_baseline") : 0
  if (need("outcome") != "ok" || need("bit_identical") != "true" || t <= 0 || baseline <= 0)
    fail("outcome " value("outcome") ", bit_identical " value("bit_identical") ", ms " t ", ms_baseline " baseline)
  if (on == "CPU")
    cpu_line()
  else if (suite == "storm")
    storm_line()
  else if (suite == "bsr16" || suite == "nm24")
    weights_line()
  else if (suite == "epilogue16")
    epilogue_line()
  else if (suite == "given16")
    given_line()
  else if (suite ~ /16$/)
    gpu16_line()
  else
    gpu_line()
}
END {
  if (failed)
    exit 1
  for (key in took)
    if (split(key, part, SUBSEP) && part[1] != "joint" && ("joint", part[2]) in took)
      gain[part[1], part[2]] = took[key] / took["joint", part[2]]
  text["cpu"] = record["CPU"] ". **Dense wins** " dense_wins("over-strips") " nonzeros in strips, and " \
    dense_wins("over-single") " where zeros are anywhere in A (1024³). Our error against float64 is at most " \
    times(worst["cpu"]) " times the library's."
  text["summary"] = "CPU: " record["CPU"] ". **Dense wins** there " dense_wins("over-strips") " nonzeros in strips, " \
    "and " dense_wins("over-single") " where zeros are anywhere in A."
  if ("GPU" in record) {
    text["gpu"] = record["GPU"] ". **Dense wins** " dense_wins("own") " nonzeros in strips, if the dense kernel is " \
      "ours; cuBLAS beats the skipping kernel " dense_wins("cublas") ". The error of our fp32 kernels against " \
      "float64 is at most " times(worst["fp32"]) " times cuBLAS's, " times(worst["long-k"]) " times at k = 16384."
    text["summary"] = text["summary"] " GPU: " record["GPU"] ". Dense wins there " dense_wins("own") \
      " in strips (fp32)."
  }
  if (swept)
    text["gpu16-sweep"] = "`auto` is at its worst, of these " swept " products, on " lowest_at ": " \
      sprintf("%.3f", lowest["sweep16"]) " times cuBLAS. The error of our 16-bit kernels against float64 is at " \
      "most " times(worst["16"]) " times cuBLAS's, " \
      times(worst["error16"]) " times where C is fp32; every one gave the same bits twice."

  if (rivals)
    best_of_all()
  if (grouped)
    text["gpu16-nm"] = "`auto` is at its worst, of these " grouped " products, on " grouped_worst ": " \
      sprintf("%.3f", lowest["nm24"]) " times cuBLAS with dense weights."
  if (stormed)
    text["gpu-storm"] = "`auto` is below 0.95 times cuBLAS on " (storm_below ? storm_below : "none") " of " stormed \
      " products" (storm_below ? " (" percent(storm_below / stormed) "), those above" : "") ". It is at its worst on " \
      storm_worst ": " sprintf("%.3f", lowest["storm"]) " times cuBLAS. In the geometric mean it is " \
      times(exp(storm_sum / stormed)) " times as fast."

  file = blocks "/run"
  printf "" > file
  if (run_rows != "") {
    print "```console\n$ make        # the library and the command, in build/" > file
    print "$ make run    # a density sweep, checked against float64; here lines of the record, some rows and columns cut" > file
    print "density  kernel                      ms  extract  dense ms  speedup    error  fastest dense" > file
    printf "%s```\n", run_rows > file
  }
  close(file)
  for (name in title) {
    file = blocks "/" name
    printf "" > file
    if (name in head && (columns_of[name] || name in text))
      print head[name] > file
    if (columns_of[name] && name in head)
      print "" > file
    if (columns_of[name])
      write_table(name, file)
    if (name in text) {
      print "" > file
      write_text(text[name], file)
    }
    close(file)
  }
}
