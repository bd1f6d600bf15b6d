# python.mk: what the Python package takes of the build, and its tests. Included by the Makefile.
#
#   make python-files    $(BUILD)/python: libesmm.so and the command without debug information, for a wheel
#   make wheel           a wheel in $(BUILD)/wheel
#   make python-test     the tests of python/tests with this build's library; PYTHON=python3.12 for another Python

PYTHON ?= python3
PYTHON_LIB := $(BUILD)/python/libesmm.so.$(SOVERSION)

.PHONY: python-files wheel python-test
python-files: $(PYTHON_LIB) $(BUILD)/python/esmm

$(PYTHON_LIB): $(BUILD)/libesmm.so.$(VERSION)
	@mkdir -p $(@D) && rm -f $(@D)/libesmm.so.*
	@strip -o $@ $<

# The command shares the library, kernels for GPUs and all, that lies in the folder above it.
$(BUILD)/python/esmm: $(CLI_OBJ) $(PYTHON_LIB)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) -s -Wl,-rpath,'$$ORIGIN/..' $^ -o $@ $(IO_LIBS) $(LDLIBS)

wheel:
	@mkdir -p $(BUILD)/wheel
	@BUILD='$(abspath $(BUILD))' $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(BUILD)/wheel .

python-test: $(BUILD)/libesmm.so
	@ESMM_LIBRARY='$(abspath $(BUILD))/libesmm.so' PYTHONPATH=python \
	  $(PYTHON) -m pytest -q -p no:cacheprovider python/tests
