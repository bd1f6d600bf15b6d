# gpu_table.awk: the README's results for a GPU, from a record that bench/gpu_record.sh wrote. readme_table.sh runs it.

function percent(x) { return sprintf("%.3g %%", 100 * x) }
function times(x) { return x >= 9.95 ? sprintf("%.1f", x) : sprintf("%.2f", x) }
function ms(x) { return sprintf(x >= 9.995 ? "%.1f" : "%.3f", x) }
function share(part, all) { return part > 0 && all > 0 ? sprintf("%.1f %%", 100 * part / all) : "" }

# Where the skipping kernel is as fast as `rival` (ms by density), between the two densities measured beside it.
function crossover(rival,   i, d, before, high, low) {
  for (i = 1; i <= densities; i++) {
    d = density[i]
    if (!(d in joint) || !(d in rival))
      continue
    low = rival[d] / joint[d]
    if (low >= 1 && before == "")
      return "at no density up to " percent(d)
    if (low >= 1)
      return sprintf("above %.0f %%", 100 * (d + (before - d) * (low - 1) / (low - high)))
    before = d
    high = low
  }
  return before == "" ? "(not measured)" : "already at " percent(before)
}

# ---- 16-bit operands: a suite is a grid of times faster, or lines of a table ----

function fine(x) { return x < 0.0995 ? sprintf("%.4f", x) : ms(x) }

function product_name(   m, n, k) {
  m = value("m"); n = value("n"); k = value("k")
  return m == n && n == k ? m "³" : m " × " n ", k " k
}

# A cell of the grid of a suite; rows in the order of the record, columns by density.
function cell16(row,   at) {
  if (!((suite, row) in known)) {
    known[suite, row] = 1
    row16[suite, ++rows16[suite]] = row
  }
  if (!((suite, asked) in column_known)) {
    column_known[suite, asked] = 1
    columns16[suite]++
    for (at = columns16[suite]; at > 1 && column16[suite, at - 1] < asked; at--)
      column16[suite, at] = column16[suite, at - 1]
    column16[suite, at] = asked
  }
  grid16[suite, row, asked] = times(speedup)
}

function print_grid16(name, title,   i, j, line) {
  if (!rows16[name])
    return
  line = "| " title " |"
  for (j = 1; j <= columns16[name]; j++)
    line = line " " percent(column16[name, j]) " |"
  print ""
  print line
  line = "| --- |"
  for (j = 1; j <= columns16[name]; j++)
    line = line " ---: |"
  print line
  for (i = 1; i <= rows16[name]; i++) {
    line = "| " row16[name, i] " |"
    for (j = 1; j <= columns16[name]; j++)
      line = line " " grid16[name, row16[name, i], column16[name, j]] " |"
    print line
  }
}

function line16(text) { text16[suite, ++lines16[suite]] = text }

function print_lines16(name, head, rule,   i) {
  if (!lines16[name])
    return
  print ""
  print head
  print rule
  for (i = 1; i <= lines16[name]; i++)
    print text16[name, i]
}

function half(   product, dtype, ours) {
  any16 = 1
  product = product_name(); dtype = value("dtype")
  ours = kernel !~ /^cublas/
  if (value("bit_identical") != "true")
    fail("two calls of " kernel " gave different bits")
  if (ours && ratio > worst16[suite == "error16"])
    worst16[suite == "error16"] = ratio
  if (suite == "dense16" && ours && !automatic) {
    own16[dtype, product] = "| " kernel " | " fine(t) " | " times(speedup)
  } else if (suite == "dense16" && automatic) {
    dense16[++denses] = dtype SUBSEP product
    auto16[dtype, product] = kernel " | " fine(t) " | " times(speedup) " |"
    cublas16[dtype, product] = fine(baseline)
  } else if (suite == "strips16" || suite == "joint16")
    cell16(product ", " (automatic ? "auto" : kernel))
  else if (suite == "decode16" && value("m") == 1)
    cell16(product ", " (automatic ? "auto" : kernel))
  else if (suite == "decode16" && automatic)
    line16("| " product " | " value("asked") " | " percent(value("density_a")) " | " percent(value("strip128_density_a")) \
      " | " kernel " | " fine(t) " | " fine(baseline) " | " times(speedup) " |")
  else if (suite == "real16" && automatic)
    line16("| " value("asked") " | " product " | " percent(value("density_a")) " | " percent(value("strip128_density_a")) \
      " | " kernel " | " fine(t) " | " fine(baseline) " | " times(speedup) " |")
  else if (suite == "sweep16") {
    cell16(product)
    cells16++
    if (least16 == "" || speedup < least16) {
      least16 = speedup
      where16 = product " at " percent(asked) ", where it took " kernel
    }
  } else if (suite == "random16") {
    if (low16 == "" || speedup < low16)
      low16 = speedup
    if (speedup > high16)
      high16 = speedup
  }
}

function print_half(   i, key) {
  wrapped("**bf16 and fp16** on " (mains ? "the same GPU" : gpu " (" features "), driver " driver ", " library ", " date \
    ", source `" id "`") ", C in the operands' dtype; a product is m × n and its k. cuBLAS multiplies " \
    "in that dtype too, B row-major, on the same data or on random dense data, whichever it is faster on; numbers are " \
    "times faster than that, with the scan of A, B prepared.")
  if (denses) {
    print ""
    print "| no zeros | dtype | cuBLAS ms | our own kernel | ms | times faster | auto takes | ms | times faster |"
    print "| --- | --- | ---: | --- | ---: | ---: | --- | ---: | ---: |"
    for (i = 1; i <= denses; i++) {
      key = dense16[i]
      split(key, part, SUBSEP)
      print "| " part[2] " | " part[1] " | " cublas16[key] " " (key in own16 ? own16[key] : "| | | ") " | " auto16[key]
    }
  }
  print_grid16("strips16", "A sparse by strips of 128 rows, B dense, bf16")
  print_grid16("joint16", "A and B sparse by strips of 128, bf16")
  print_grid16("decode16", "one row, zeros anywhere, bf16")
  print_lines16("decode16", "| few rows, bf16 | activations | nonzeros | k's any row needs | auto takes | ms | cuBLAS ms | " \
    "times faster |", "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |")
  print_lines16("real16", "| activations of a trained net | product | nonzeros | in strips of 128 | auto takes | ms | " \
    "cuBLAS ms | times faster |", "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |")
  print_grid16("sweep16", "`auto`, A sparse by strips of 128, bf16")
  print ""
  key = ""
  if (cells16)
    key = "Of these " cells16 " products `auto` is worst, " sprintf("%.3f", least16) " times cuBLAS, on " where16 ". "
  if (low16 != "")
    key = key "With zeros anywhere in A (50 and 10 % nonzeros, 16 to 4096 rows) it is " times(low16) " to " times(high16) \
      " times as fast. "
  key = key "The error against float64 of our 16-bit kernels is at most " sprintf("%.2f", worst16[0]) " times cuBLAS's"
  if (worst16[1] > 0)
    key = key ", " sprintf("%.2f", worst16[1]) " times where C is fp32"
  wrapped(key "; each gave the same bits twice.")
}

{
  suite = value("suite"); asked = value("asked") + 0; kernel = value("kernel"); speedup = value("speedup") + 0
  t = value("ms") + 0; extract = value("ms_extract") + 0; baseline = value("ms_baseline") + 0
  if (value("outcome") != "ok")
    fail("the result of " kernel " is " value("outcome") ", not ok")
  if (FNR == 1) {
    id = value("source_id"); date = value("date"); gpu = value("device_name"); features = value("features")
    library = value("libraries"); driver = value("driver")
  }
  if (value("source_id") != id || value("date") != date || value("device_name") != gpu)
    fail("not of the same build, day and GPU as the first line")
  if (t <= 0 || baseline <= 0)
    fail("ms is " value("ms") ", ms_baseline " value("ms_baseline"))
  error = value("rel_err") + 0; dense_error = value("rel_err_baseline") + 0
  ratio = dense_error > 0 ? error / dense_error : 0
  automatic = value("requested") == "auto"
  if (suite ~ /16$/) {
    half()
    next
  }
  if (kernel !~ /^(cublas|ladder)/ && suite != "over" && ratio > worst[suite == "long-k"])
    worst[suite == "long-k"] = ratio

  if (suite == "blockwise" || suite == "over") {
    densities = insert(density, densities, asked)
    if (kernel ~ /^joint/ && !automatic)
      joint[asked] = t
    if (kernel ~ /^dense/ && !automatic)
      own[asked] = t
    if (!(asked in cublas) || baseline < cublas[asked])
      cublas[asked] = baseline
  }
  if (suite == "blockwise" && automatic)
    main[++mains] = "| " percent(asked) " | " kernel " | " ms(t) " | " ms(baseline) " | " times(speedup) " | " \
      share(extract, t) " | " sprintf("%.2f", ratio) " |"
  if ((suite == "sizes" || suite == "blockwise") && automatic && (asked == 0.5 || asked == 0.25)) {
    sizes = insert(size, sizes, value("m") + 0)
    cell["size", value("m") + 0, asked] = times(speedup)
    cell["extract", value("m") + 0, asked] = share(extract, t)
  }
  if (suite == "only-a" || suite == "only-b") {
    sides = insert(side, sides, asked)
    cell[suite, asked] = times(speedup)
  }
  if (suite == "ladder") {
    number = value("number") + 0
    ladder[++steps] = "| " (number > 0 ? number : "") " | " kernel " | " ms(t) " | " (extract > 0 ? ms(extract) : "") " | " \
      ms(t - extract) " | " times(speedup) " | " sprintf("%.2f", ratio) " |"
  }
}
END {
  if (failed)
    exit 1
  if (!mains && !any16) {
    print "readme_table.sh: the GPU record has no products" > "/dev/stderr"
    exit 1
  }
  if (mains)
    print_single()
  if (mains && any16)
    print ""
  if (any16)
    print_half()
}

function print_single(   i, head, rule, a, b) {
  wrapped("On a GPU: " gpu " (" features "), driver " driver ", " library ", " date ", source `" id "`; fp32, 4096³, " \
    "whole strips of 32 rows of A and of 32 columns of B nonzero, independently. Device time of a call with the scan " \
    "of A; cuBLAS is fp32 without TF32, on the same data or on random dense data, whichever it is faster on.")
  print ""
  print "| nonzeros | kernel chosen | ms | cuBLAS ms | times faster | scan of A | error over cuBLAS's |"
  print "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
  for (i = 1; i <= mains; i++)
    print main[i]
  if (sizes) {
    print ""
    print "| times faster, by size | 50 % | scan of A | 25 % | scan of A |"
    print "| --- | ---: | ---: | ---: | ---: |"
    for (i = sizes; i > 0; i--)
      print "| " size[i] "³ | " cell["size", size[i], 0.5] " | " cell["extract", size[i], 0.5] " | " \
        cell["size", size[i], 0.25] " | " cell["extract", size[i], 0.25] " |"
  }
  if (sides) {
    print ""
    head = "| one operand sparse, 4096³ |"; rule = "| --- |"; a = "| only A |"; b = "| only B |"
    for (i = 1; i <= sides; i++) {
      head = head " " percent(side[i]) " |"
      rule = rule " ---: |"
      a = a " " cell["only-a", side[i]] " |"
      b = b " " cell["only-b", side[i]] " |"
    }
    print head
    print rule
    print a
    print b
  }
  print ""
  wrapped("**Dense wins** " crossover(own) " nonzeros over strips at 4096³, if the dense kernel is ours; cuBLAS beats " \
    "the skipping kernel there " crossover(cublas) ". The error against float64 of our kernels is at " \
    "most " sprintf("%.2f", worst[0]) " times cuBLAS's" \
    (worst[1] > 0 ? ", " sprintf("%.2f", worst[1]) " times at k = 16384" : "") ".")
  if (steps) {
    print ""
    print "The ladder of earlier kernels at 50 %, 4096³ (SIMT, extraction and multiplication apart):"
    print ""
    print "| number | kernel | ms | extract | multiply | times cuBLAS | error over cuBLAS's |"
    print "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for (i = 1; i <= steps; i++)
      print ladder[i]
  }
}
