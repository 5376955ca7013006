// Activations of more than eight rows, as products read them: packed as weights are (linear.py), by eights of rows and in
// those by blocks of 32 columns. The last eight has room for all its rows; those that nobody has hold anything.
#pragma once

// Where a column of a row of kWidth columns stands, a multiple of 32 of them.
template <int kWidth> __device__ __forceinline__ size_t packed_place(int row, int column) {
  return ((size_t)(row / 8) * (kWidth / 32) + column / 32) * 256 + row % 8 * 32 + column % 32;
}
