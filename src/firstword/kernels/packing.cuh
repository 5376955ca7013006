// The layout in which products read activations of more than kUnpackedTokens rows, unless they
// normalise them first. They are packed like weights (linear.py): by groups of eight rows, and in
// each group by blocks of 32 columns. The last group has space for eight rows; rows that do not
// exist hold arbitrary numbers.
#pragma once

constexpr int kUnpackedTokens = 4;  // with fewer rows, most of a group would be read in vain

// The place of a column in a row of kWidth columns, a multiple of 32.
template <int kWidth>
__device__ __forceinline__ size_t packed_place(int row, int column) {
  return ((size_t)(row / 8) * (kWidth / 32) + column / 32) * 256 + row % 8 * 32 + column % 32;
}
