/*
 * test_tiles.c: the table of test_kernels.c for the kernels on AMX tiles, linked with the tiles of src/cpu/amx.h in
 * plain C: so they are tested on machines without AMX too, where those have AVX-512 BF16 and VBMI2. Where there is AMX,
 * test_kernels.c runs them on it.
 */
#define TABLE_OF "_amx"
#include "test_kernels.c"
