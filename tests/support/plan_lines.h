/*
 * plan_lines.h: a file of JSON lines, one a product, that a test writes and compares with what it should be.
 *
 *   {"product":"...","kernel":"...","first":[{"launch":"...",...},...],"last":[...]}
 *
 * A line is found by its product. Where it is another, what is reported is which of its fields are.
 */
#ifndef ESMM_TEST_PLAN_LINES_H
#define ESMM_TEST_PLAN_LINES_H

#include <stdbool.h>
#include <stddef.h>

/* A text that grows. */
typedef struct plan_text {
  char *data; /* ends with a 0; to be freed */
  size_t length, room;
} plan_text;
void plan_add(plan_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Says how `is` differs from `should`, both such files, and counts the lines that do: 0 where they are equal. */
int plan_compare(const char *should, const char *is, plan_text *said);

#endif
