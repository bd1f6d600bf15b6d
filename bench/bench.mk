# bench.mk: the benchmarks of record, and the tables of the README and docs/PERFORMANCE.md made from them. Included at the
# end of the Makefile.
#
#   make bench-record [THREADS=2]   measures on this machine, on an idle one, and writes bench/results/<cpu>/cpu.jsonl
#   make gpu-check [STAGES=tests]   on a machine with a GPU: tests, compute-sanitizer, then bench/results/<gpu>/gpu.jsonl
#   make gpu-programs               what gpu-check needs, to be built where there is no GPU: carry $(BUILD)/gpu there
#   make ladder                     $(BUILD)/ladder, the kernels of earlier work beside cuBLAS: bench/ladder
#   make gpu-record-status          fresh, stale or none: is the GPU record of these sources?
#   make tables                     rewrites the tables of README.md and docs/PERFORMANCE.md from the newest records, and
#                                   docs/kernels.md from the registry; needs Python and cmocka
#   make figures                    draws docs/figures from the same records; needs Python and matplotlib
#   make report                     writes docs/report.md from them and bench/report.in.md; needs Python
#   make report-pdf                 $(BUILD)/report.pdf of it; needs pandoc and weasyprint

.PHONY: bench-record ladder gpu-check gpu-programs gpu-record-status tables figures report report-pdf
bench-record:
	@sh scripts/setup.sh run
	@$(MAKE) --no-print-directory all
	@ESMM='$(BUILD)/esmm' $(if $(THREADS),THREADS='$(THREADS)') sh bench/record.sh

# The library with the ladder's kernels in its registry and fatbins, and the command without its main.
LADDER_SRC := $(wildcard bench/ladder/*.c)
LADDER_FATBIN := $(if $(NVCC_USED),$(FATBIN_DIR)/k_ladder.fatbin)
LADDER_OBJ := $(LADDER_SRC:%.c=$(BUILD)/obj/%.o) $(BUILD)/obj/ladder/registry.o $(BUILD)/obj/ladder/fatbins.o
LADDER_LINKED := $(LADDER_OBJ) $(filter-out %/cli/main.o,$(CLI_OBJ))
ladder: $(BUILD)/ladder
$(BUILD)/obj/bench/ladder/%.o: ALL_CFLAGS += -Icli

$(LADDER_FATBIN): bench/ladder/k_ladder.cu $(FATBIN_DIR)/flags scripts/fatbin.sh scripts/fatbin_check.sh
	@echo "  nvcc $<"
	@sh scripts/fatbin.sh $< $@ $(NVCC_USED) $(NVCC_FLAGS) $(CODE)

$(BUILD)/gen/ladder/registry.inc: $(KERNEL_SRC) bench/ladder/k_ladder.c
	@mkdir -p $(@D)
	@sed -n 's/^ESMM_KERNEL(\([a-z0-9_]*\)).*/X(\1)/p' $^ | LC_ALL=C sort > $@

$(BUILD)/obj/ladder/registry.o: src/registry.c $(BUILD)/gen/ladder/registry.inc $(BUILD)/gen/flags
	@mkdir -p $(@D)
	@$(CC) -I$(BUILD)/gen/ladder $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/gen/ladder/fatbins.S: $(BUILD)/gen/fatbins.S bench/bench.mk
	@mkdir -p $(@D)
	@sh scripts/fatbins.sh \
	  "$$(CUDA='$(CUDA)' NVCC='$(NVCC)' NVCC_CCBIN='$(NVCC_CCBIN)' sh scripts/find_nvcc.sh version)" \
	  '$(FATBIN_DIR)' $(CU_NAMES) k_ladder > $@

$(BUILD)/obj/ladder/fatbins.o: $(BUILD)/gen/ladder/fatbins.S $(FATBINS) $(LADDER_FATBIN)
	@mkdir -p $(@D)
	@$(CC) -c $< -o $@

$(BUILD)/ladder: $(LADDER_LINKED) $(BUILD)/libesmm.a
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $^ -o $@ $(IO_LIBS) $(LDLIBS)

-include $(LADDER_SRC:%.c=$(BUILD)/obj/%.d) $(BUILD)/obj/ladder/registry.d $(LADDER_FATBIN:.fatbin=.d)

gpu-check:
	@BUILD='$(BUILD)' MAKE='$(MAKE)' $(if $(STAGES),STAGES='$(STAGES)') sh bench/gpu_check.sh

# Without debug information, and with the libraries that a bare machine may miss.
GPU_TESTS := $(addprefix test_,accuracy cuda cuda16 cuda16_shapes cuda_blocks cuda_explain cuda_ffn cuda_ffn_decode cuda_formats cuda_half cuda_remember epilogue epilogue_options kernels \
  overlap pattern threads values)
gpu-programs: $(BUILD)/esmm $(BUILD)/ladder $(BUILD)/libesmm.so.$(VERSION) $(BUILD)/examples/ffn_speed_gpu $(BUILD)/examples/ffn_train $(GPU_TESTS:%=$(BUILD)/tests/%)
	@rm -rf $(BUILD)/gpu && mkdir -p $(BUILD)/gpu/lib
	@for file in $^; do strip -o "$(BUILD)/gpu/$${file##*/}" "$$file" || exit 1; done
	@for file in $^; do ldd "$$file"; done | sed -n 's/.*=> \(\/.*\) (.*/\1/p' | sort -u | \
	  grep -v -E '/lib(c|m|dl|rt|pthread)\.so|/ld-linux' | while read -r file; do cp -L "$$file" $(BUILD)/gpu/lib/; done
	@sh bench/gpu_check.sh --id > $(BUILD)/gpu/id

gpu-record-status: $(BUILD)/gen/source_id.h
	@sh bench/gpu_status.sh "$$(sed -n 's/.*"\(.*\)"/\1/p' $<)"

tables: $(BUILD)/tests/test_kernel_page
	@$(PYTHON) bench/tables.py
	@ESMM_GOLDEN_UPDATE=1 $<

# PNGs lie beside the SVGs, but only those are kept in the repository.
figures:
	@$(PYTHON) bench/figures.py

report:
	@$(PYTHON) bench/report.py

report-pdf:
	@PYTHON='$(PYTHON)' sh bench/report_pdf.sh '$(BUILD)/report.pdf'
