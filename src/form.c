/* form.c: the names of the forms of B, and why weights may lack one. */
#include "form.h"

const esmm_form esmm_form_table[ESMM_FORM_KINDS] = {
    [ESMM_FORM_PANELS] = {"panels", ESMM_FORMAT_DENSE, "the weights were prepared for decode only"},
    [ESMM_FORM_ROWS] = {"rows", ESMM_FORMAT_DENSE, "the weights were prepared for large m only"},
    [ESMM_FORM_BSR] = {"blocks", ESMM_FORMAT_BSR, "the weights are in another format"},
    [ESMM_FORM_NM] = {"groups", ESMM_FORMAT_NM, "the weights are in another format"},
    [ESMM_FORM_TURNED] = {"turned columns", ESMM_FORMAT_DENSE, "b has more than 15 columns"},
    [ESMM_FORM_ONEDNN] =
        {"layout of oneDNN", ESMM_FORMAT_DENSE,
         "b is fp16 or small, few of its k's are alive, it was prepared for decode, or there is no room for it"},
    [ESMM_FORM_STRIPS] = {"strips", ESMM_FORMAT_DENSE, "the weights are in another format"},
    [ESMM_FORM_COLUMNS] = {"columns", ESMM_FORMAT_DENSE,
                           "b is not fp32, or it was prepared for decode, or max_bytes_ratio is below 2"},
    [ESMM_FORM_ROWS16] = {"16-bit rows", ESMM_FORMAT_DENSE, "b is fp32"},
    [ESMM_FORM_TIGHT32] = {"fp32 rows", ESMM_FORMAT_DENSE,
                           "b is not fp32, or it was prepared for decode, or max_bytes_ratio is below 3"},
    [ESMM_FORM_TIGHT16] = {"tight 16-bit rows", ESMM_FORMAT_DENSE,
                           "b is fp32, or has enough columns in multiples of 8, or max_bytes_ratio is below 2"},
    [ESMM_FORM_CELLS16] = {"cells", ESMM_FORMAT_BSR, "b is fp32"},
    [ESMM_FORM_NM16] = {"2:4 blocks", ESMM_FORMAT_NM, "some four k's may have more than two nonzeros"},
    [ESMM_FORM_TURNED16] = {"16-bit columns", ESMM_FORMAT_DENSE, "the weights were prepared"},
};

unsigned esmm_forms_of_format(esmm_format_kind format)
{
  unsigned mask = 0;
  for (int i = 0; i < ESMM_FORM_KINDS; i++)
    if (esmm_form_table[i].format == format)
      mask |= 1u << i;
  return mask;
}
