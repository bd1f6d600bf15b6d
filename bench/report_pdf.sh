#!/bin/sh
# report_pdf.sh FILE: docs/report.md as a PDF. `make report-pdf` runs it.
#
# By pandoc, which knows the Markdown of these pages, and weasyprint, which sets HTML and SVG as they are: a few packages
# instead of a LaTeX of gigabytes, and no browser.
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/report.pdf}
for tool in pandoc weasyprint; do
  command -v $tool >/dev/null || {
    echo "report_pdf.sh: $tool is not installed: apt-get install pandoc weasyprint (or pip install weasyprint)" >&2
    exit 1
  }
done
[ -f docs/report.md ] || { echo 'report_pdf.sh: there is no docs/report.md; make report writes it' >&2; exit 1; }
for figure in $(sed -n 's/^!\[.*\](\(.*\))$/docs\/\1/p' docs/report.md); do
  [ -f "$figure" ] || { echo "report_pdf.sh: there is no $figure; make figures draws it" >&2; exit 1; }
done
mkdir -p "$(dirname "$out")" && work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/page.css" <<'CSS' || exit 1
@page { size: A4; margin: 20mm 18mm; @bottom-center { content: counter(page); font: 8pt sans-serif } }
body { font: 10pt/1.4 sans-serif }
header { display: none }
table { border-collapse: collapse; font-size: 8pt; width: 100%; margin: 1em 0 }
th, td { border-bottom: 0.5pt solid #bbb; padding: 2pt 4pt; text-align: left }
img { display: block; margin: 0 auto; width: 100mm; max-height: 235mm; object-fit: contain }
figure { margin: 1em 0; text-align: center; font-size: 8.5pt }
code, pre { font: 8.5pt monospace; white-space: pre-wrap }
h2, h3 { break-after: avoid }
CSS
pandoc docs/report.md --from gfm --to html5 --standalone --metadata pagetitle=ESMM --css "$work/page.css" \
  --output "$work/report.html" && weasyprint --quiet --base-url docs/ "$work/report.html" "$out" || exit 1
echo "written: $out"
