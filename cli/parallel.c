/*
 * parallel.c: a loop on several threads, for the command's work beside the library. Each loop starts threads, which
 * take its items in turn; if the system refuses them, the caller does the rest.
 */
#include "cli.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct loop {
  cli_item *item;
  void *arg;
  int64_t items;
  _Atomic int64_t next;
} loop;

static void *do_items(void *arg)
{
  loop *l = arg;
  for (int64_t i; (i = l->next++) < l->items;)
    l->item(l->arg, i);
  return NULL;
}

void cli_parallel(int threads, int64_t items, cli_item *item, void *arg)
{
  loop l = {.item = item, .arg = arg, .items = items};
  pthread_t *others = cli_alloc((size_t)threads, sizeof *others);
  int count = 0;
  while (count + 1 < threads && count + 1 < items && pthread_create(&others[count], NULL, do_items, &l) == 0)
    count++;
  (void)do_items(&l);
  while (count > 0)
    (void)pthread_join(others[--count], NULL);
  free(others);
}
