# cpu_table.awk: the README's results for a CPU, from a record that bench/record.sh wrote. readme_table.sh runs it.

function percent(density) { return sprintf("%.3g %%", 100 * density) }
function times(x) { return x >= 9.95 ? sprintf("%.0f", x) : sprintf(x >= 1.995 ? "%.1f" : "%.2f", x) }
function milliseconds(x) { return x >= 99.5 ? sprintf("%.0f", x) : sprintf("%.3g", x) }

# The density at which the best skipping kernel is as fast as the dense library, between the two measured beside it.
function crossover(suite, count, densities, best,   i, high, low, at) {
  if (!count)
    return "(not measured)"
  if (best[suite, densities[1]] >= 1)
    return "at no density up to " percent(densities[1])
  for (i = 2; i <= count; i++)
    if (best[suite, densities[i]] >= 1) {
      high = best[suite, densities[i - 1]]
      low = best[suite, densities[i]]
      at = densities[i] + (densities[i - 1] - densities[i]) * (low - 1) / (low - high)
      return sprintf("above %.0f %%", 100 * at)
    }
  return "already at " percent(densities[count])
}

{
  suite = value("suite"); asked = value("asked"); speedup = value("speedup") + 0; baseline = value("ms_baseline") + 0
  if (value("outcome") != "ok")
    fail("the result of " value("kernel") " is " value("outcome") ", not ok")
  if (FNR == 1) {
    id = value("source_id"); date = value("date"); cpu = value("device_name"); features = value("features")
    libraries = value("libraries"); threads = value("threads"); dtype = value("dtype")
  }
  if (value("source_id") != id || value("threads") != threads || value("date") != date)
    fail("not of the same build, threads and day as the first line")
  if (speedup <= 0 || baseline <= 0)
    fail("speedup is " value("speedup") ", ms_baseline " value("ms_baseline"))
  error = value("rel_err") + 0; dense_error = value("rel_err_baseline") + 0
  if (dense_error > 0 && error / dense_error > worst)
    worst = error / dense_error
  if (suite == "activations") {
    activations = activations (activations ? ", " : "") asked " layers (" sprintf("%.1f %%", 100 * value("density_a")) \
      " nonzero) " times(speedup) " x"
    shape = value("m") " x " value("k") " x " value("n")
  } else if (suite == "over-strips" || suite == "over-single") {
    if (suite == "over-strips")
      strips = insert(strip_at, strips, asked + 0)
    else
      singles = insert(single_at, singles, asked + 0)
    if (speedup > best[suite, asked + 0])
      best[suite, asked + 0] = speedup
  } else {
    m = value("m")
    if (suite == "blockwise")
      name = "strips of 32, A and B, " m "³"
    else if (suite == "unstructured")
      name = "single elements, A only, " m "³"
    else if (suite == "decode")
      name = "decode, A only, " m " x " value("k") " x " value("n")
    else
      fail("unknown suite " suite)
    if (!(name in seen)) {
      seen[name] = 1
      row[++rows] = name
      dense[name] = baseline
    }
    if (baseline < dense[name])
      dense[name] = baseline
    columns = insert(column, columns, asked + 0)
    cell[name, asked + 0] = times(speedup)
  }
}
END {
  if (failed)
    exit 1
  if (!rows) {
    print "readme_table.sh: the record has no products" > "/dev/stderr"
    exit 1
  }
  wrapped("Times faster than the fastest of " libraries ", by share of nonzeros; " dtype ", " threads " thread" \
    (threads == 1 ? "" : "s") ", " cpu " (" features "), " date ", source `" id "`. The scan of A is part of our time.")
  print ""
  head = "| where the zeros are | dense ms |"
  rule = "| --- | ---: |"
  for (i = 1; i <= columns; i++) {
    head = head " " percent(column[i]) " |"
    rule = rule " ---: |"
  }
  print head
  print rule
  for (r = 1; r <= rows; r++) {
    line = "| " row[r] " | " milliseconds(dense[row[r]]) " |"
    for (i = 1; i <= columns; i++)
      line = line " " cell[row[r], column[i]] " |"
    print line
  }
  print ""
  if (activations)
    wrapped("Generated activations like those of a trained ReLU² net, " shape ": " activations ".")
  wrapped("**Dense wins** " crossover("over-strips", strips, strip_at, best) " nonzeros for strips, " \
    crossover("over-single", singles, single_at, best) " for single elements of A (1024³). Our error against float64 " \
    "is at most " sprintf("%.1f", worst) " times that library's.")
}
