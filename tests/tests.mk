# tests.mk: the test programs, the fuzz targets, and `make test`. Included at the end of the Makefile.
#
#   make test                     sets up what is missing, builds with gcc and clang, runs everything
#   make test-long                the same with long tables, every program in every build, and clang-tidy
#   make test-programs            builds the test programs of this configuration (CC, SANITIZE, ...) in $(BUILD)/tests
#   make tidy                     clang-tidy over every C file, as .clang-tidy says
#   make golden                   writes tests/golden anew: the command's outputs, hashes of C of the CPU kernels, and a
#                                 GPU's plans; read the diff
#   make fuzz FUZZ_SECONDS=60     libFuzzer on each target for that long; needs clang
#   make soak [SEED=1]            random calls until one is wrong (tests/test_random.c); SANITIZE=address,undefined too

FUZZ_SECONDS ?= 60

TEST_PROGRAMS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/test_*.c)))
TILE_PROGRAMS := $(if $(filter x86_64,$(ARCH)),$(BUILD)/tests/test_tiles_kernels $(BUILD)/tests/test_tiles_values)
FUZZ_SRC := $(sort $(wildcard tests/fuzz/fuzz_*.c))
REPLAY_PROGRAMS := $(FUZZ_SRC:tests/fuzz/fuzz_%.c=$(BUILD)/tests/replay_%)
FUZZ_PROGRAMS := $(FUZZ_SRC:tests/fuzz/fuzz_%.c=$(BUILD)/tests/fuzz_%)
TEST_SUPPORT := $(BUILD)/obj/tests/support/harness.o $(filter $(BUILD)/obj/io/%,$(CLI_OBJ)) $(BUILD)/libesmm.a
# A CUDA driver on host memory, for tests of what happens when the driver fails.
FAKE_CUDA := $(BUILD)/tests/fake/libcuda.so.1
# A clock by which others take a part of the CPUs, or none.
FAKE_CLOCK := $(BUILD)/tests/fake/clock.so
# NVML whose GPU takes as many watts as a test says.
FAKE_NVML := $(BUILD)/tests/fake/libnvidia-ml.so.1
TEST_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard tests/*.c tests/support/*.c tests/fuzz/*.c))

# ffn_mpi.c needs the header of MPI.
TIDY := $(addprefix tidy/,$(LIB_SRC) $(CLI_SRC) $(filter-out examples/ffn_mpi.c,$(wildcard tests/*.c tests/support/*.c tests/fuzz/*.c examples/*.c bench/ladder/*.c)))

.PHONY: test test-long test-programs objects tidy golden soak fuzz fuzz-programs $(TIDY)
.SECONDARY: $(TEST_OBJ)

test:
	@BUILD='$(BUILD)' MAKE='$(MAKE)' sh tests/run_tests.sh

test-long:
	@BUILD='$(BUILD)' MAKE='$(MAKE)' sh tests/run_tests.sh long

test-programs: $(TEST_PROGRAMS) $(TILE_PROGRAMS) $(REPLAY_PROGRAMS) $(BUILD)/ladder $(FAKE_CUDA) $(FAKE_CLOCK) $(FAKE_NVML)

# Every C file past a compiler's eyes, without code: `make CC=clang EXTRA_CFLAGS=-fsyntax-only WERROR=1 objects`.
objects: $(filter-out %/fatbins.o,$(LIB_OBJ)) $(filter-out %/page.o,$(CLI_OBJ)) $(TEST_OBJ)

tidy: $(TIDY)

tidy/%_avx2.c: ISA_FLAGS := $(AVX2_FLAGS)
tidy/%_avx512.c: ISA_FLAGS := $(AVX512_FLAGS)
tidy/%_avx512bf16.c: ISA_FLAGS := $(AVX512BF16_FLAGS)
tidy/%_amx.c: ISA_FLAGS := $(AMX_FLAGS)
$(TIDY): tidy/%: $(GEN)
	@clang-tidy --quiet $* -- $(ALL_CFLAGS) $(ISA_FLAGS) -Icli -Iio -Itests -Itests/support

golden: $(BUILD)/esmm $(BUILD)/tests/test_hashes $(BUILD)/tests/test_cuda_golden $(FAKE_CUDA)
	@rm -rf $(BUILD)/golden && mkdir -p $(BUILD)/golden tests/golden
	@ESMM_GOLDEN_UPDATE=1 TREE='$(abspath $(BUILD))' WORK='$(abspath $(BUILD))/golden' sh tests/test_cli.sh | grep -v '^ok'; \
	  ESMM_GOLDEN_UPDATE=1 $(BUILD)/tests/test_hashes && \
	  ESMM_GOLDEN_UPDATE=1 $(BUILD)/tests/test_cuda_golden && echo "  tests/golden written"

# A build with sanitizers has a directory of its own.
SOAK_BUILD := $(BUILD)$(if $(SANITIZE),/soak)
soak:
	@$(MAKE) --no-print-directory BUILD='$(SOAK_BUILD)' FATBIN_DIR='$(FATBIN_DIR)' $(SOAK_BUILD)/tests/test_random
	@ESMM_TEST_CALLS=0 ESMM_TEST_SEED='$(or $(SEED),1)' $(SOAK_BUILD)/tests/test_random

$(BUILD)/obj/tests/%.o: ALL_CFLAGS += -Icli -Iio -Itests -Itests/support
# Most of their time is the compiler's; the oracles, in tests/support, stay as fast as the library.
$(BUILD)/obj/tests/test_%.o: ALL_CFLAGS += -O1

$(TEST_PROGRAMS): $(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(TEST_SUPPORT)
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ -lcmocka -lpthread $(IO_LIBS) $(LDLIBS)

# The kernels' own blocking functions: most of what these headers have is not used there.
CUTS_OBJ := $(patsubst %,$(BUILD)/obj/tests/support/cuts_%.o,portable $(if $(filter x86_64,$(ARCH)),avx2 avx512 \
  pairs_avx512bf16 decode_avx512bf16 nm_avx512bf16 amx))
$(CUTS_OBJ): ALL_CFLAGS += -Wno-unused-function -Wno-shadow
$(BUILD)/tests/test_blocking $(BUILD)/tests/test_random: $(BUILD)/obj/tests/support/cuts.o $(CUTS_OBJ)
$(BUILD)/tests/test_random: $(patsubst %,$(BUILD)/obj/tests/support/random_%.o,layer product prune tools world wrong) \
  $(BUILD)/obj/tests/support/ffn_oracle.o $(BUILD)/obj/tests/support/ffn_rig.o

# The command's own check of results, and its counters of energy.
$(BUILD)/tests/test_bench_check $(BUILD)/tests/test_energy: $(filter $(BUILD)/obj/cli/%,$(filter-out %/main.o,$(CLI_OBJ)))

# The kernels on AMX tiles where there is no AMX, with tiles in plain C (src/cpu/amx.h): the table of kernels for them
# alone, and special values.
EMULATED := $(patsubst %.c,$(BUILD)/obj/emulated/%.o,src/cpu/cpuid.c $(filter %_amx.c,$(LIB_SRC)))
$(BUILD)/obj/emulated/%_amx.o: ISA_FLAGS := $(AMX_FLAGS)
$(BUILD)/obj/emulated/%.o: %.c $(BUILD)/gen/flags | $(GEN)
	@mkdir -p $(@D)
	@echo "  cc $< (emulated)"
	@$(CC) $(ALL_CFLAGS) $(ISA_FLAGS) -Icli -Iio -Itests -Itests/support -DESMM_AMX_EMULATED -MMD -MP -c $< -o $@
$(BUILD)/obj/emulated/tests/test_kernels.o: ALL_CFLAGS += '-DTABLE_OF="_amx"'
$(TILE_PROGRAMS): $(BUILD)/tests/test_tiles_%: $(BUILD)/obj/emulated/tests/test_%.o $(EMULATED) $(TEST_SUPPORT)
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ -lcmocka -lpthread $(IO_LIBS) $(LDLIBS)

$(filter $(BUILD)/tests/test_ffn% $(BUILD)/tests/test_cuda_ffn%,$(TEST_PROGRAMS)): $(BUILD)/obj/tests/support/ffn_oracle.o $(BUILD)/obj/tests/support/ffn_rig.o

$(BUILD)/tests/test_cuda_golden: $(BUILD)/obj/tests/support/params_names.o $(BUILD)/obj/tests/support/plan_lines.o

$(FAKE_CUDA): $(BUILD)/obj/tests/support/fake_cuda.o
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) -shared -Wl,-soname,libcuda.so.1 $(LDFLAGS) $^ -o $@ -lpthread

$(FAKE_CLOCK) $(FAKE_NVML):
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) -shared $(LDFLAGS) $^ -o $@
$(FAKE_CLOCK): $(BUILD)/obj/tests/support/fake_clock.o
$(FAKE_NVML): $(BUILD)/obj/tests/support/fake_nvml.o

# A fuzz target with a plain main: its corpus is a test in every build, with any compiler.
$(REPLAY_PROGRAMS): $(BUILD)/tests/replay_%: $(BUILD)/obj/tests/fuzz/fuzz_%.o $(BUILD)/obj/tests/fuzz/replay.o \
  $(filter-out $(BUILD)/obj/tests/support/harness.o,$(TEST_SUPPORT))
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $^ -o $@ $(IO_LIBS) $(LDLIBS)

# The same targets with libFuzzer's main. Only `make fuzz` builds these, in a tree whose objects report coverage.
$(FUZZ_PROGRAMS): $(BUILD)/tests/fuzz_%: $(BUILD)/obj/tests/fuzz/fuzz_%.o \
  $(filter-out $(BUILD)/obj/tests/support/harness.o,$(TEST_SUPPORT))
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) -fsanitize=fuzzer $^ -o $@ $(IO_LIBS) $(LDLIBS)

fuzz-programs: $(FUZZ_PROGRAMS)

# New finds go to $(BUILD)/fuzz/corpus, so that the tree's own corpus stays what it was; a crash leaves its input in
# $(BUILD)/fuzz, and belongs into tests/fuzz/corpus once it is mended.
fuzz:
	@$(MAKE) --no-print-directory BUILD='$(BUILD)/fuzz' FATBIN_DIR='$(FATBIN_DIR)' CC=clang SANITIZE=address,undefined \
	  EXTRA_CFLAGS='-O1 -fsanitize=fuzzer-no-link' fuzz-programs
	@for target in $(FUZZ_SRC:tests/fuzz/fuzz_%.c=%); do \
	  mkdir -p $(BUILD)/fuzz/corpus/$$target; \
	  echo "== fuzz $$target, $(FUZZ_SECONDS) s"; \
	  $(BUILD)/fuzz/tests/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 \
	    -artifact_prefix=$(BUILD)/fuzz/crash_$${target}_ -print_final_stats=1 -verbosity=0 \
	    $(BUILD)/fuzz/corpus/$$target tests/fuzz/corpus/$$target >$(BUILD)/fuzz/$$target.log 2>&1 || \
	    { tail -n 60 $(BUILD)/fuzz/$$target.log; exit 1; }; \
	  grep stat:: $(BUILD)/fuzz/$$target.log; \
	done

-include $(TEST_OBJ:.o=.d) $(EMULATED:.o=.d) $(BUILD)/obj/emulated/tests/test_kernels.d $(BUILD)/obj/emulated/tests/test_values.d
