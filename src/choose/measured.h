/*
 * measured.h: what calls took, over what the cost model had predicted for them, by class of call and by kernel. The
 * model knows neither another machine's constants nor structure that no density shows; a clock does.
 *
 * One table for the process, shared by contexts and threads: reading takes no lock, and of two threads that add at once
 * one drops its time. It has a fixed size and no pointers: the class unused for longest makes room for a new one. What
 * it holds never changes what a product is, only which kernel makes it.
 */
#ifndef ESMM_MEASURED_H
#define ESMM_MEASURED_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define ESMM_MEASURED_CLASSES 4096
#define ESMM_MEASURED_KERNELS 8 /* of a class */
#define ESMM_MEASURED_TIMES 12  /* the last ones of each kernel */

/* A class of call: a hash of all that it has in common. 0 is none. */
typedef uint64_t esmm_class;

/* What a ratio stands on. */
typedef struct esmm_evidence {
  int times; /* how many there were, at most ESMM_MEASURED_TIMES; */
  bool warm; /* not only in first calls, with cold caches */
} esmm_evidence;

static inline void esmm_evidence_more(esmm_evidence *x, esmm_evidence other)
{
  x->times = other.times > x->times ? other.times : x->times;
  x->warm = x->warm || other.warm;
}

/* The lower quartile of the last times of a kernel, over what was predicted; 0 where there are none. */
double esmm_measured(esmm_class of, int kernel, esmm_evidence *seen);
/* How many times there were in all. */
uint32_t esmm_measured_count(esmm_class of, int kernel);
/* The ratio over all classes, for those without one. */
double esmm_measured_anywhere(int kernel);
/* One more. home: the file that it is kept in, see saved.h; 0: in none. The first warm one drops those before it
   that were above it. */
void esmm_measured_add(esmm_class of, uint32_t home, int kernel, bool warm, double ratio);
/* All is forgotten: for tests, which are alone then. */
void esmm_measured_clear(void);

/* How many were added to classes of a file since esmm_measured_written was called for it. */
uint32_t esmm_measured_news(uint32_t home);
void esmm_measured_written(uint32_t home);
/* Classes of a file as lines of text, at most `most` bytes; false where writing failed. name: of a kernel. */
bool esmm_measured_print(FILE *f, uint32_t home, long most, const char *(*name)(int kernel));
/* One such line. What the table has stays; a line without room is left out. False: it is not one. */
bool esmm_measured_parse(const char *line, uint32_t home, int (*kernel_of)(const char *name));

#endif
