/* SPDX-License-Identifier: Apache-2.0
 *
 * What the DSL's static runtime lacks beside its shared one: turning a CUDA error of a launcher into
 * an exception. Linked into every kernel of a bundle.
 */
#include <stdint.h>

typedef void (*set_error_fn)(const char *kind, const char **parts, int32_t num_parts);

extern const char *cuda_dialect_get_error_name(int32_t code);

void CuteDSLRT_TVMFFISetRaisedCudaError(set_error_fn set_error, int32_t code) {
  const char *parts[] = {"CUDA Error: ", cuda_dialect_get_error_name(code)};
  set_error("CUDADialectError", parts, 2);
}
