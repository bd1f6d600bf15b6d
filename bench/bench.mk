# bench.mk: the benchmarks of record, and the tables of the README and docs/PERFORMANCE.md made from them. Included at the
# end of the Makefile.
#
#   make bench-record [THREADS=2]   measures on this machine, on an idle one, and writes bench/results/<cpu>/cpu.jsonl
#   make gpu-check [STAGES=tests]   on a machine with a GPU: tests, compute-sanitizer, then bench/results/<gpu>/gpu.jsonl
#   make gpu-programs               what gpu-check needs, to be built where there is no GPU: carry $(BUILD)/gpu there
#   make gpu-record-status          fresh, stale or none: is the GPU record of these sources?
#   make tables                     rewrites the tables of README.md and docs/PERFORMANCE.md from the newest records
#   make figures                    draws docs/figures from the same records; needs Python and matplotlib
#   make report                     writes docs/report.md from them and bench/report.in.md; needs Python
#   make report-pdf                 $(BUILD)/report.pdf of it; needs pandoc and weasyprint

.PHONY: bench-record gpu-check gpu-programs gpu-record-status tables figures report report-pdf
bench-record:
	@sh scripts/setup.sh run
	@$(MAKE) --no-print-directory all
	@ESMM='$(BUILD)/esmm' $(if $(THREADS),THREADS='$(THREADS)') sh bench/record.sh

gpu-check:
	@BUILD='$(BUILD)' MAKE='$(MAKE)' $(if $(STAGES),STAGES='$(STAGES)') sh bench/gpu_check.sh

# Without debug information, and with the libraries that a bare machine may miss.
GPU_TESTS := $(addprefix test_,accuracy cuda cuda16 cuda16_shapes cuda_blocks cuda_explain cuda_ffn cuda_ffn_decode cuda_formats cuda_half cuda_remember epilogue epilogue_options kernels \
  overlap pattern threads values)
gpu-programs: $(BUILD)/esmm $(BUILD)/libesmm.so.$(VERSION) $(BUILD)/examples/ffn_speed_gpu $(BUILD)/examples/ffn_train $(GPU_TESTS:%=$(BUILD)/tests/%)
	@rm -rf $(BUILD)/gpu && mkdir -p $(BUILD)/gpu/lib
	@for file in $^; do strip -o "$(BUILD)/gpu/$${file##*/}" "$$file" || exit 1; done
	@for file in $^; do ldd "$$file"; done | sed -n 's/.*=> \(\/.*\) (.*/\1/p' | sort -u | \
	  grep -v -E '/lib(c|m|dl|rt|pthread)\.so|/ld-linux' | while read -r file; do cp -L "$$file" $(BUILD)/gpu/lib/; done
	@sh bench/gpu_check.sh --id > $(BUILD)/gpu/id

gpu-record-status: $(BUILD)/gen/source_id.h
	@sh bench/gpu_status.sh "$$(sed -n 's/.*"\(.*\)"/\1/p' $<)"

tables:
	@sh bench/tables.sh

# PNGs lie beside the SVGs, but only those are kept in the repository.
figures:
	@$(PYTHON) bench/figures.py

report:
	@$(PYTHON) bench/report.py

report-pdf:
	@PYTHON='$(PYTHON)' sh bench/report_pdf.sh '$(BUILD)/report.pdf'
