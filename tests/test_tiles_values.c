/* test_tiles_values.c: test_values.c with AMX's tiles in plain C, as test_tiles.c has them. */
#include "test_values.c"
