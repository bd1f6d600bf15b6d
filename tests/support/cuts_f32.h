/* cuts_f32.h: CUTS_NAME, the blocks of the fp32 kernels of an instruction set. Included after its vec_*.h. */
#include "cuts.h"

#include "cpu/bsr.h"
#include "cpu/decode.h"
#include "cpu/direct.h"
#include "cpu/dots.h"
#include "cpu/nm.h"
#include "cpu/rows.h"

cuts CUTS_NAME(const esmm_kernel *kernel, const esmm_problem *p)
{
  if (cuts_idea(kernel, "rows"))
    return (cuts){{{rows_layout(p).block_rows, BAND}, {ROW_COLS}, {ROW_K}}};
  if (cuts_idea(kernel, "dots"))
    return (cuts){{{dots_item(p), DOTS_BLOCK}, {DOTS_WIDE}, {DOTS_K, DOTS_SHORT}}};
  if (cuts_idea(kernel, "decode"))
    return (cuts){{{1}, {decode_lay_out(p).width}, {DECODE_K, p->m > 1 ? PARTIAL_K : PARTIAL, DECODE_SCAN}}};
  if (cuts_idea(kernel, "direct")) {
    const direct_part x = direct_lay_out(p);
    return (cuts){{{x.rows, x.lines}, {x.cols}, {x.ks, DIRECT_CHAIN}}};
  }
  if (cuts_idea(kernel, "bsr") && bsr_few(p))
    return (cuts){{{FEW_ROWS}, {p->w->bsr.block_cols}, {FEW_PARTIAL}}};
#if SELECT_MOST > 0
  if (cuts_idea(kernel, "nm") && nm_selects(p->w)) {
    const select_layout l = select_lay_out(p);
    return (cuts){{{l.mc, SELECT_ROWS}, {l.nc * ESMM_HALF_COLS}, {l.kc, l.kc * l.at_once, SELECT_CHAIN}}};
  }
#endif
  if (cuts_idea(kernel, "nm") && takes_lists(p))
    return (cuts){{{LISTS_ROWS}, {lists_lay_out(p).nc * ESMM_HALF_COLS}, {LISTS_PART}}};
  const blocking g = plan_blocks(p, kernel->flags & ESMM_KERNEL_SKIPS);
  return (cuts){{{g.mc, g.strip_rows}, {g.nc * g.width}, {g.kc, STRAIGHT_CHAIN, MOST_PAIRED}}};
}
