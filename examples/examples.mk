# examples.mk: `make examples` builds the programs of examples/ in $(BUILD)/examples. Included by the Makefile.
#
# They are linked with the library and, unlike it, with the file readers of io/.

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(wildcard examples/ffn_*.c))
EXAMPLE_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard examples/*.c))

.PHONY: examples
examples: $(EXAMPLES)

$(BUILD)/obj/examples/%.o: ALL_CFLAGS += -Iio

$(BUILD)/examples/ffn_train: $(BUILD)/obj/examples/plot.o
$(EXAMPLES): $(BUILD)/examples/%: $(BUILD)/obj/examples/%.o $(filter $(BUILD)/obj/io/%,$(CLI_OBJ)) $(BUILD)/libesmm.a
	@mkdir -p $(@D)
	@echo "  ld $@"
	@$(CC) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ $(IO_LIBS) $(LDLIBS)

-include $(EXAMPLE_OBJ:.o=.d)
