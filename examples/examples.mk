# examples.mk: `make examples` builds the programs of examples/ in $(BUILD)/examples. Included by the Makefile.
#
# They are linked with the library and, unlike it, with the file readers of io/. ffn_mpi needs MPI: it is built where
# mpicc is there, and named where it is not.

EXAMPLE_MPI := examples/ffn_mpi.c
EXAMPLE_SRC := $(filter-out $(EXAMPLE_MPI),$(wildcard examples/*.c))
EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(filter examples/ffn_%,$(EXAMPLE_SRC)))
EXAMPLE_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(EXAMPLE_SRC))
MPICC := $(shell command -v mpicc)

.PHONY: examples examples-mpi
examples: $(EXAMPLES) $(if $(MPICC),$(BUILD)/examples/ffn_mpi,examples-mpi)

examples-mpi:
	@echo "  examples/ffn_mpi is not built: mpicc is not installed"

$(BUILD)/obj/examples/%.o: ALL_CFLAGS += -Iio

$(BUILD)/examples/ffn_train: $(BUILD)/obj/examples/plot.o
$(EXAMPLES): $(BUILD)/examples/%: $(BUILD)/obj/examples/%.o $(filter $(BUILD)/obj/io/%,$(CLI_OBJ)) $(BUILD)/libesmm.a
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ $(IO_LIBS) $(LDLIBS)

# mpicc calls $(CC), with what MPI needs.
$(BUILD)/examples/ffn_mpi: $(EXAMPLE_MPI) $(BUILD)/libesmm.a
	@mkdir -p $(@D)
	@echo "  mpicc $@"
	@OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC) $(ALL_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

-include $(EXAMPLE_OBJ:.o=.d)
