/* A user's program, built against the installed library with pkg-config and with CMake. Prints 19 22 43 50. */
#include <esmm.h>
#include <esmm_ffn.h>
#include <esmm_tools.h>
#include <stdio.h>

int main(void)
{
  float a[] = {1, 2, 3, 4}, b[] = {5, 6, 7, 8}, c[4];
  esmm_matrix ma = {.data = a, .rows = 2, .cols = 2}, mb = {.data = b, .rows = 2, .cols = 2};
  esmm_matrix mc = {.data = c, .rows = 2, .cols = 2};
  const esmm_generator dense = {.size = sizeof dense, .seed = 1};
  esmm_ctx *ctx = NULL;
  esmm_weights *w = NULL;
  esmm_status status = esmm_ctx_create(&ctx, NULL);
  if (status == ESMM_OK)
    status = esmm_prepare(ctx, &mb, NULL, &w);
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &ma, w, &mc, NULL, NULL);
  printf("%s: %g %g %g %g\n", esmm_status_str(status), c[0], c[1], c[2], c[3]);
  if (status == ESMM_OK)
    status = esmm_generate(ctx, &dense, &ma);
  esmm_ffn_free(NULL);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  return status == ESMM_OK && c[0] == 19 && c[1] == 22 && c[2] == 43 && c[3] == 50 ? 0 : 1;
}
