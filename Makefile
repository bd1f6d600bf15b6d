# ESMM: the reference build (GNU make).
#
#   make                 build/libesmm.a, build/libesmm.so, build/esmm; on all cores unless -j gives a number
#   make run             the main job: a checked density sweep against the best dense library
#   make test            every test; closes with one line 'N passed, N failed, N skipped'
#   make install PREFIX=/usr/local
#   make uninstall       takes away what make install put there
#   make examples        the programs of examples/ in build/examples
#   make help            this list, with the targets for tests, benchmarks and Python
#
# Options: CC=clang, WERROR=1, BUILD=dir, SANITIZE=address,undefined or thread, EXTRA_CFLAGS=...,
# NVCC=/path/to/nvcc, CUDA=0 (no GPU kernels), FATBIN_DIR=dir (GPU kernels that another build has compiled),
# JANSSON=0, LIBZIP=0 (the command reads no safetensors, no .pt), COSTS=dir (dir/cpu/costs.h and dir/cuda/costs.h in
# place of those in src: scripts/constants.py --perturb). For 0 also no, off, false; for 1 yes, on, true.

# -j on this command line is stronger than this; that of a make above is in the environment. Until 4.4 make shows
# neither while it reads a makefile.
ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS) $(shell echo "$$MAKEFLAGS")),)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1)
endif
ifeq ($(origin CC),default)
CC := gcc
endif
BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
WERROR ?= 0
SANITIZE ?=
EXTRA_CFLAGS ?=
CUDA ?= 1
NVCC ?=
NVCC_CCBIN ?=
FATBIN_DIR ?= $(BUILD)/fatbin
COSTS ?=
# What may be 1 or 0 may be written in words. What is neither is a mistake: CUDA=no must never mean yes.
YES := 1 yes Yes YES on On ON true True TRUE
NO := 0 no No NO off Off OFF false False FALSE
switch = $(if $(filter $(YES),$($(1))),1,$(if $(filter $(NO),$($(1))),0,$(error $(1)='$($(1))' is not understood: 1, yes, \
  on or true, or 0, no, off or false)))
override CUDA := $(call switch,CUDA)
override WERROR := $(call switch,WERROR)
# One spelling of each path for all builds that share it: the flags and the .d files there have it, too. So `make`,
# `make install` and pip, which says BUILD=/the/tree/build, find one another's objects.
override BUILD := $(patsubst $(CURDIR)/%,%,$(abspath $(BUILD)))
override FATBIN_DIR := $(abspath $(FATBIN_DIR))

VERSION := $(shell sed -n 's/^.define ESMM_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/esmm.h | paste -sd.)
# Minor versions may change the interface until 1.0, so until then the soname has both numbers.
SOVERSION := $(shell echo $(VERSION) | sed 's/^0\.\([0-9]*\)\..*/0.\1/; t; s/\..*//')
ARCH := $(shell $(CC) -dumpmachine 2>/dev/null | cut -d- -f1)

WARN := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes
CFLAGS ?= -O3 -g
# What the command reads safetensors and .pt files with, where it is installed; the library needs neither.
has_header = $(shell printf '\043include <$(1)>\n' | $(CC) $(EXTRA_CFLAGS) -E -x c - >/dev/null 2>&1 && echo 1 || echo 0)
ifeq ($(origin JANSSON),undefined)
JANSSON := $(call has_header,jansson.h)
endif
override JANSSON := $(call switch,JANSSON)
ifeq ($(origin LIBZIP),undefined)
LIBZIP := $(call has_header,zip.h)
endif
override LIBZIP := $(call switch,LIBZIP)
IO_LIBS := $(if $(filter 1,$(JANSSON)),-ljansson) $(if $(filter 1,$(LIBZIP)),-lzip)
# -fno-var-tracking: 8 s for 12 of the largest file in gcc, with the same code; a debugger may miss variables.
ALL_CFLAGS := -std=c11 -D_GNU_SOURCE $(CFLAGS) $(WARN) -fno-var-tracking -fvisibility=hidden -fPIC \
  -fno-math-errno -ffp-contract=off -Iinclude $(addprefix -I,$(COSTS)) -Isrc -I$(BUILD)/gen -DESMM_JANSSON=$(JANSSON) -DESMM_LIBZIP=$(LIBZIP) $(EXTRA_CFLAGS)
LDLIBS := -lm -ldl -lpthread
ifeq ($(WERROR),1)
ALL_CFLAGS += -Werror
endif
ifneq ($(SANITIZE),)
ALL_CFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SANITIZE)
else
NO_UNDEFINED := -Wl,--no-undefined # clang's sanitizers are in the program, not in what it loads
endif

# Only the kernels of an instruction set are compiled for it; the library picks at run time.
AVX2_FLAGS := -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512cd -mprefer-vector-width=512
AVX512BF16_FLAGS := $(AVX512_FLAGS) -mavx512bf16
AMX_FLAGS := $(AVX512BF16_FLAGS) -mavx512vbmi2 -mamx-tile -mamx-bf16

LIB_SRC := $(sort $(shell find src -name '*.c'))
ifneq ($(ARCH),x86_64)
LIB_SRC := $(filter-out %_avx2.c %_avx512.c %_avx512bf16.c %_amx.c,$(LIB_SRC))
ALL_CFLAGS += -DESMM_PORTABLE
endif
CLI_SRC := $(sort $(wildcard cli/*.c cli/*/*.c io/*.c))
KERNEL_SRC := $(filter src/cpu/ref.c $(foreach f,$(LIB_SRC),$(if $(findstring /k_,$(f)),$(f))),$(LIB_SRC))
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/obj/%.o) $(BUILD)/obj/fatbins.o
CLI_OBJ := $(CLI_SRC:%.c=$(BUILD)/obj/%.o) $(BUILD)/obj/cli/record/page.o
GEN := $(BUILD)/gen/registry.inc $(BUILD)/gen/source_id.h
ID_FILES := $(sort $(wildcard include/*.h) $(shell find src -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh') $(wildcard $(COSTS:%=%/*/costs.h)) Makefile)

# GPU kernels: NAME.cu, wherever it lies in src/cuda, becomes $(FATBIN_DIR)/NAME.fatbin, which the library embeds.
NVCC_USED := $(shell CUDA='$(CUDA)' NVCC='$(NVCC)' NVCC_CCBIN='$(NVCC_CCBIN)' sh scripts/find_nvcc.sh)
CU_SRC := $(sort $(shell find src/cuda -name '*.cu'))
CU_NAMES := $(sort $(basename $(notdir $(CU_SRC))))
$(if $(filter-out $(words $(CU_SRC)),$(words $(CU_NAMES))),$(error two .cu files of one name in src/cuda))
vpath %.cu $(sort $(dir $(CU_SRC)))
FATBINS := $(if $(NVCC_USED),$(CU_NAMES:%=$(FATBIN_DIR)/%.fatbin))
NVCC_FLAGS := -O3 -std=c++17 -lineinfo -Xfatbin=-compress-all -Iinclude -Isrc -t 0 $(if $(NVCC_CCBIN),-ccbin $(NVCC_CCBIN))
CODE_SM90A := -gencode arch=compute_90a,code=sm_90a
CODE_ALL := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=compute_80 $(CODE_SM90A)

.PHONY: all lib run clean help install uninstall found
all: found $(BUILD)/libesmm.a $(BUILD)/libesmm.so $(BUILD)/esmm
lib: $(BUILD)/libesmm.a $(BUILD)/libesmm.so

found:
	@CC='$(CC)' ARCH='$(ARCH)' CUDA='$(CUDA)' NVCC='$(NVCC)' NVCC_CCBIN='$(NVCC_CCBIN)' \
	  JANSSON='$(JANSSON)' LIBZIP='$(LIBZIP)' sh scripts/found.sh

$(BUILD)/gen/registry.inc: $(KERNEL_SRC) Makefile
	@mkdir -p $(@D)
	@sed -n 's/^ESMM_KERNEL(\([a-z0-9_]*\)).*/X(\1)/p' $(KERNEL_SRC) | LC_ALL=C sort > $@.tmp
	@cmp -s $@.tmp $@ || mv $@.tmp $@

$(BUILD)/gen/source_id.h: $(ID_FILES)
	@mkdir -p $(@D)
	@printf '#define ESMM_SOURCE_ID "%s"\n' \
	  "$$(for f in $(ID_FILES); do printf '%s\n' $$f; cat $$f; done | sha256sum | cut -c1-16)" > $@.tmp
	@mv $@.tmp $@

$(FATBIN_DIR)/%_sm90a.fatbin: CODE := $(CODE_SM90A)
$(FATBIN_DIR)/%.fatbin: CODE := $(CODE_ALL)
$(FATBINS): $(FATBIN_DIR)/%.fatbin: %.cu $(FATBIN_DIR)/flags scripts/fatbin.sh scripts/fatbin_check.sh
	@echo "  nvcc $<"
	@sh scripts/fatbin.sh $< $@ $(NVCC_USED) $(NVCC_FLAGS) $(CODE)

$(BUILD)/gen/fatbins.S: FORCE
	@mkdir -p $(@D)
	@tmp=$@.$$$$; sh scripts/fatbins.sh \
	  "$$(CUDA='$(CUDA)' NVCC='$(NVCC)' NVCC_CCBIN='$(NVCC_CCBIN)' sh scripts/find_nvcc.sh version)" \
	  '$(FATBIN_DIR)' $(CU_NAMES) > $$tmp && { cmp -s $$tmp $@ || mv $$tmp $@; }; status=$$?; rm -f $$tmp; exit $$status

$(BUILD)/obj/fatbins.o: $(BUILD)/gen/fatbins.S $(FATBINS)
	@mkdir -p $(@D)
	@$(CC) -c $< -o $@

.PHONY: fatbins FORCE
fatbins: $(FATBINS)

# `make` first says what it found, and tries to compile nothing where nothing can be compiled.
ifneq ($(filter all found,$(or $(MAKECMDGOALS),all)),)
$(LIB_OBJ) $(CLI_OBJ) $(FATBINS): | found
endif

# The flags are part of what an object is made from: a change of CC or flags rebuilds.
FLAGS_NOW := $(CC) $(ALL_CFLAGS) $(LDFLAGS)
ifneq ($(FLAGS_NOW),$(shell cat $(BUILD)/gen/flags 2>/dev/null))
$(shell mkdir -p $(BUILD)/gen; printf '%s' '$(FLAGS_NOW)' > $(BUILD)/gen/flags)
endif

NVCC_FLAGS_NOW := $(NVCC_USED) $(NVCC_FLAGS) $(CODE_ALL)
ifneq ($(NVCC_USED),)
ifneq ($(NVCC_FLAGS_NOW),$(shell cat $(FATBIN_DIR)/flags 2>/dev/null))
$(shell mkdir -p $(FATBIN_DIR); printf '%s' '$(NVCC_FLAGS_NOW)' > $(FATBIN_DIR)/flags)
endif
endif

$(BUILD)/obj/cli/%.o: ALL_CFLAGS += -Icli
$(BUILD)/obj/%_avx2.o: ISA_FLAGS := $(AVX2_FLAGS)
$(BUILD)/obj/%_avx512.o: ISA_FLAGS := $(AVX512_FLAGS)
$(BUILD)/obj/%_avx512bf16.o: ISA_FLAGS := $(AVX512BF16_FLAGS)
$(BUILD)/obj/%_amx.o: ISA_FLAGS := $(AMX_FLAGS)
# Generated headers must be there; who includes one knows it by its .d file.
$(BUILD)/obj/%.o: %.c $(BUILD)/gen/flags | $(GEN)
	@mkdir -p $(@D)
	@echo "  cc $<"
	@$(CC) $(ALL_CFLAGS) $(ISA_FLAGS) -MMD -MP -c $< -o $@

# The page of `esmm report`, in the command as it is.
$(BUILD)/obj/cli/record/page.o: cli/record/page.S cli/record/page.html
	@mkdir -p $(@D)
	@$(CC) -c $< -o $@

$(BUILD)/libesmm.a: $(LIB_OBJ)
	@echo "  ar $@"
	@rm -f $@ && ar rcs $@ $^

$(BUILD)/libesmm.so.$(VERSION): $(LIB_OBJ)
	@echo "  ld $@"
	@$(CC) -shared -Wl,-soname,libesmm.so.$(SOVERSION) $(NO_UNDEFINED) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/libesmm.so: $(BUILD)/libesmm.so.$(VERSION)
	@ln -sf libesmm.so.$(VERSION) $(BUILD)/libesmm.so.$(SOVERSION)
	@ln -sf libesmm.so.$(SOVERSION) $@

$(BUILD)/esmm: $(CLI_OBJ) $(BUILD)/libesmm.a
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $^ -o $@ $(IO_LIBS) $(LDLIBS)

run:
	@sh scripts/setup.sh run
	@$(MAKE) --no-print-directory all
	@$(BUILD)/esmm bench auto 5 --size 1024 --blockwise --sweep 1,.75,.5,.25,.125 --no-tune

clean:
	rm -rf $(BUILD)

# Each makefile starts with a list of its targets.
help:
	@sed -n 's/^#   \(make.*\)/\1/p' Makefile $(filter %.mk,$(MAKEFILE_LIST))
	@sed -n '/^# Options:/,/^$$/s/^# *//p' Makefile

-include $(LIB_OBJ:.o=.d) $(CLI_OBJ:.o=.d) $(FATBINS:.fatbin=.d)
include scripts/install.mk
include tests/tests.mk
include bench/bench.mk
include examples/examples.mk
include python/python.mk
