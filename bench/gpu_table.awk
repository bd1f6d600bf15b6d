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
  if (!mains) {
    print "readme_table.sh: the GPU record has no products" > "/dev/stderr"
    exit 1
  }
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
