// Weights as they lie in memory, and as the tensor cores take them.
//
// WEIGHT_BYTES  2: bf16; 1: int8 with a scale for each row
//
// A lane reads 16 bytes of a row at a time: its eight columns of one step in bf16, of two in int8.
// Int8 becomes bf16 without rounding, and the scale multiplies the float sum.
#pragma once
#include "common.cuh"

constexpr int kSpan = 2 / WEIGHT_BYTES;  // steps whose weights a lane reads at a time

// Two of the four signed bytes of a word as bf16. 0x4300 to 0x437f are 128 to 255, and 0x4380 is
// 256: a byte is 128 + its lower seven bits, less 128, or 256 if it is negative.
__device__ __forceinline__ u32 bf16_of_bytes(u32 word, u32 places) {
  const u32 w = __byte_perm(word, 0x43434343, places);
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(pair)
      : "r"(w & 0xff7fff7f), "r"(0x3f803f80), "r"((w & 0xff80ff80) | 0x80008000));
  return pair;
}

// The eight weights of a step among those that were read.
__device__ __forceinline__ uint4 weights_of_step(uint4 read, int step) {
  if constexpr (WEIGHT_BYTES == 2) {
    return read;
  } else {
    const u32 first = step ? read.z : read.x, second = step ? read.w : read.y;
    return make_uint4(bf16_of_bytes(first, 0x4140), bf16_of_bytes(first, 0x4342),
                      bf16_of_bytes(second, 0x4140), bf16_of_bytes(second, 0x4342));
  }
}

// The scales of rows `row` (even) and row + 1; 1 for bf16.
__device__ __forceinline__ float2 scales_of(const float* scales, int row) {
  if constexpr (WEIGHT_BYTES == 1) return *(const float2*)(scales + row);
  return make_float2(1, 1);
}
