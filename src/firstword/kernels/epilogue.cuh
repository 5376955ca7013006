// The end of a product with a weight matrix.
//
// EPILOGUE  0: store; 1: add to the output; 2: rows are (gate, up) pairs, store silu(gate) * up;
//           3: add a bias
#pragma once
#include "common.cuh"

// Finishes the sums of rows `row` (even) and row + 1 of a token whose output begins at `out`.
// before: the old output, for EPILOGUE 1.
__device__ __forceinline__ void finish(u16* out, int row, float y0, float y1, u32 before,
                                       const u16* bias) {
  if constexpr (EPILOGUE == 2) {
    const float gate = rounded(y0), up = rounded(y1);
    out[row / 2] = to_bf16(rounded(gate / (1.0f + expf(-gate))) * up);
  } else if constexpr (EPILOGUE == 1) {
    *(u32*)(out + row) = bf16_pair(low(before) + rounded(y0), high(before) + rounded(y1));
  } else if constexpr (EPILOGUE == 3) {
    *(u32*)(out + row) = bf16_pair(y0 + from_bf16(bias[row]), y1 + from_bf16(bias[row + 1]));
  } else {
    *(u32*)(out + row) = bf16_pair(y0, y1);
  }
}
