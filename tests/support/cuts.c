/* cuts.c: which of the files cuts_*.c knows a kernel; see cuts.h. */
#include "cuts.h"

cuts cuts_of(const esmm_kernel *kernel, const esmm_problem *p)
{
#ifndef ESMM_PORTABLE
  if (strstr(kernel->name, "_amx"))
    return cuts_amx(kernel, p);
  if (strcmp(kernel->name, "decode_bf16_avx512bf16") == 0)
    return cuts_decode(kernel, p);
  if (strcmp(kernel->name, "nm_bf16_avx512bf16") == 0)
    return cuts_nm(kernel, p);
  if (strstr(kernel->name, "_avx512bf16") && !cuts_idea(kernel, "rows"))
    return cuts_pairs(kernel, p);
  if (strstr(kernel->name, "_avx512"))
    return cuts_avx512(kernel, p);
  if (strstr(kernel->name, "_avx2"))
    return cuts_avx2(kernel, p);
#endif
  return cuts_portable(kernel, p);
}

bool cuts_any(const esmm_kernel *kernel, esmm_problem *p)
{
  double units[ESMM_COST_TERMS] = {0};
  for (int i = 0; i < esmm_registry_count(); i++)
    if (esmm_registry_at(i) == kernel)
      kernel->terms(kernel, p, p->ctx->cost[i], units, &p->variant);
  const cuts x = cuts_of(kernel, p);
  const int64_t size[] = {p->m, p->n, p->k};
  for (int dim = 0; dim < 3; dim++)
    for (int which = 0; which < CUTS; which++)
      if (x.of[dim][which] && size[dim] > x.of[dim][which])
        return true;
  return false;
}
