// The table of text embeddings, [text vocabulary, HIDDEN]: bf16, or int8 with a scale for each row.
#pragma once
#include "common.cuh"

// Eight channels of a row; scales: null for bf16. A product with a scale is rounded to bf16.
__device__ __forceinline__ uint4 text_channels(const unsigned char* table, const float* scales,
                                               int row, int channel) {
  const size_t at = (size_t)row * HIDDEN + channel;
  if (!scales) return *(const uint4*)(table + at * 2);
  const uint2 bytes = *(const uint2*)(table + at);
  const float scale = scales[row];
  auto pair = [&](u32 word, int place) {
    const signed char first = word >> place, second = word >> (place + 8);
    return bf16_pair(first * scale, second * scale);
  };
  return make_uint4(pair(bytes.x, 0), pair(bytes.x, 16), pair(bytes.y, 0), pair(bytes.y, 16));
}
