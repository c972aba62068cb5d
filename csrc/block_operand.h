// Decides what an operand of a product with finer scales is: what of it lies in the scratch, and
// what is left to do to it before cuBLASLt takes it.
#pragma once

#include "block_quantize.h"
#include "block_route.h"
#include "product.h"

namespace narrowfloat {

inline BlockJob job_of(const Matrix& m) {
  BlockJob job{};
  job.x = m.owner.data_ptr();
  job.type = m.type;
  job.rows = m.rows, job.cols = m.cols;
  job.row_stride = m.row_stride, job.col_stride = m.col_stride;
  return job;
}

inline bool has_square(Scaling s) { return s == Scaling::block || s == Scaling::pow2; }

// One operand of a product: what a side of a tensor becomes in the scratch, or bf16 as it lies.
class Side {
 public:
  Side() = default;

  // side 0 of x [rows, cols], contracted along its columns, or 1, its transpose. w: a weight, in
  // squares where its scaling has them.
  Side(const Matrix& x, int side, Scaling scaling, Route route, Element element, bool w,
       Scratch& scratch)
      : scaling_(scaling), route_(route), element_(element), square_(w && has_square(scaling)) {
    size(side ? x.cols : x.rows, side ? x.rows : x.cols, scratch);
  }

  // Codes and scales that are there.
  static Side quantized(const void* codes, const void* scales, int64_t rows, int64_t cols,
                        Scaling scaling, Route route, bool w, Scratch& scratch) {
    Side s;
    s.scaling_ = scaling, s.route_ = route;
    s.square_ = w && has_square(scaling);
    s.codes_ = codes, s.scales_ = scales;
    s.size(rows, cols, scratch);
    return s;
  }

  // bf16 as it lies; on side 1 it is stored with the contracted dimension first.
  static Side direct(const Matrix& x, int side) {
    Side s;
    s.direct_ = x.owner.data_ptr();
    s.direct_ld_ = x.row_stride;
    s.k_first_ = side == 1;
    s.rows_ = side ? x.cols : x.rows, s.cols_ = side ? x.rows : x.cols;
    return s;
  }

  bool made() const { return !direct_ && !codes_ && rows_ >= 0; }

  void fill(BlockSide& side, const Scratch& scratch) const {
    if (!made()) return;
    side.form = operand() ? BlockForm::operand : BlockForm::codes;
    side.scaling = scaling_;
    side.element = element_;
    side.square = square_;
    side.data = scratch.at(first_);
    if (!operand()) side.scales = scratch.at(scales_first_);
  }

  Element format() const { return operand() ? Element::bf16 : element_; }

  Operand planned() const { return in_memory(kInScratch, kInScratch); }

  // After its job has run: what is left to do to it, and where it is.
  Operand in(const Scratch& scratch, const Launch& on) const {
    const void* data = codes_ ? codes_ : scratch.at(first_);
    const void* scales = codes_ ? scales_ : operand() ? nullptr : scratch.at(scales_first_);
    if (codes_ && operand()) {
      block_restore(scaling_, square_, codes_, scales_, rows_, cols_, scratch.at(first_),
                    on.stream);
      data = scratch.at(first_);
    }
    if (route_ == Route::mx) {
      block_spread_scales(scales, square_, rows_, cols_, scratch.at(mx_first_), on.stream);
      scales = scratch.at(mx_first_);
      if (widened_) {
        const int64_t from = padded(cols_), to = padded32(cols_);
        NF_CUDA(cudaMemsetAsync(scratch.at(wide_first_), 0, padded(rows_) * to, on.stream));
        NF_CUDA(cudaMemcpy2DAsync(scratch.at(wide_first_), to, data, from, from, padded(rows_),
                                  cudaMemcpyDeviceToDevice, on.stream));
        data = scratch.at(wide_first_);
      }
    }
    return in_memory(data, scales);
  }

  // Of Around::row_scales, after in().
  const float* row_scales(const Scratch& scratch) const {
    return static_cast<const float*>(codes_ ? scales_ : scratch.at(scales_first_));
  }

 private:
  bool operand() const { return route_ == Route::bf16 || scaling_ == Scaling::none; }

  void size(int64_t rows, int64_t cols, Scratch& scratch) {
    rows_ = rows, cols_ = cols;
    if (operand()) {
      first_ = scratch.add(padded(rows) * padded32(cols) * 2);
      return;
    }
    if (!codes_) {
      first_ = scratch.add(padded(rows) * codes_cols(scaling_, cols));
      scales_first_ = scratch.add(scale_bytes(scaling_, square_, rows, cols));
    }
    if (route_ == Route::mx) {
      mx_first_ = scratch.add(mx_scale_bytes(rows, cols));
      widened_ = padded(cols) % 32 != 0;
      if (widened_) wide_first_ = scratch.add(padded(rows) * padded32(cols));
    }
  }

  Operand in_memory(const void* data, const void* scales) const {
    Operand o{};
    o.rows = rows_;
    o.format = format();
    if (direct_) {
      o.q = direct_, o.ld = direct_ld_, o.k_first = k_first_;
      return o;
    }
    o.q = data;
    if (operand()) {
      o.ld = padded32(cols_);
      return o;
    }
    o.ld = widened_ ? padded32(cols_) : codes_cols(scaling_, cols_);
    if (route_ == Route::epilogue) return o;
    o.scale = scales;
    o.mode = scaling_ == Scaling::row                         ? ScaleMode::row
             : route_ == Route::mx || scaling_ == Scaling::mx ? ScaleMode::vec32_ue8m0
             : square_                                        ? ScaleMode::square128
                                                              : ScaleMode::vec128;
    return o;
  }

  Scaling scaling_ = Scaling::none;
  Route route_ = Route::native;
  Element element_ = Element::e4m3;
  bool square_ = false, k_first_ = false, widened_ = false;
  const void *codes_ = nullptr, *scales_ = nullptr, *direct_ = nullptr;
  int64_t rows_ = -1, cols_ = 0, direct_ld_ = 0;
  int64_t first_ = 0, scales_first_ = 0, mx_first_ = 0, wide_first_ = 0;
};

// bf16 whose rows start on 16 bytes and are whole 16-byte words.
inline bool lies_well(const Matrix& x) {
  return x.type == Real::bf16 && x.col_stride == 1 && x.row_stride % 8 == 0 && x.cols % 8 == 0 &&
         x.row_stride >= x.cols && reinterpret_cast<uintptr_t>(x.owner.data_ptr()) % 16 == 0;
}

inline Around around(Scaling scaling, Route route) {
  if (route == Route::epilogue) return Around::row_scales;
  return route == Route::native && has_square(scaling) ? Around::padded_rows : Around::nothing;
}

// A product and its operands, a [m,k] and b [n,k].
struct Step {
  Product product;
  Side a, b;
  bool row_scales = false;

  int64_t workspace(void* d, const Launch& on) const {
    return product.workspace(a.planned(), b.planned(), d, on);
  }
  void run(void* d, const Scratch& scratch, int64_t workspace, const Launch& on) {
    if (row_scales) product.set_row_scales(a.row_scales(scratch), b.row_scales(scratch));
    product.run(a.in(scratch, on), b.in(scratch, on), d, scratch, workspace, on);
  }
};

}  // namespace narrowfloat
