// Layouts other than contiguous [B,H,S,D]: other orders, gaps, zero and negative strides, and
// strides of gigabytes. Included by sweep.cu after sdpa.cu.

namespace SDPA_NAMESPACE {
namespace {

const char* const layouts[] = {"bhsd",     "bshd", "packed",    "padded",  "zero",
                               "reversed", "far",  "far_heads", "far_rows"};

// True if batches, heads or rows are over 2^31 elements apart.
bool is_far(const string& layout) { return layout.compare(0, 3, "far") == 0; }

// TMA does not support negative strides.
bool takes_layout(const string& layout) { return !(line.is_wgmma && layout == "reversed"); }

struct Placement {
  Strides strides;
  int64_t first = 0;  // element (0,0,0,0), counted from the lowest one
  int64_t span = 0;   // elements from the lowest to the highest
  // The rows of [B,H,S] are stored in pieces of a number of rows and elements. With far layouts,
  // the gigabytes between pieces are not accessed.
  int64_t piece_rows = 1, piece_span = 0;
};

// packed: Q, K and V are views of [B,S,Hq+2Hkv,D]. padded: rows and heads have gaps of VEC_WIDTH
// elements or 16 bytes, the minimum alignment of the build. zero: all batches and heads of an input
// share one [S,D]. reversed: rows and heads of the inputs have negative strides. far, far_heads,
// far_rows: batches, heads or rows are over 2^31 elements apart. dO has the layout of the inputs,
// but [B,S,H,D] with bhsd, and [B,H,S,D] with bshd and packed; with zero, all of its rows are
// shared too.
Placement place(const Problem& p, Tensor tensor) {
  const bool is_input = int(tensor) < int(Tensor::O) || tensor == Tensor::dO;
  const int64_t D = width_of(p, tensor), H = of_query(tensor) ? p.Hq : p.Hkv, S = of_query(tensor) ? p.Sq : p.Sk;
  const auto nested = [&](int64_t row, int64_t head_gap, int64_t batch_gap) {
    const int64_t head = S * row + head_gap;
    return Strides{H * head + batch_gap, head, row};
  };
  const int64_t pad = std::min<int64_t>(line.vec_width, 16 / element_bytes(dtype_of(tensor))), far = int64_t(1) << 31;
  Placement at;
  at.strides = nested(D, 0, 0);
  int together = 3;  // of row, head and batch: the number of dimensions inside a piece
  const bool is_dO = tensor == Tensor::dO, is_bshd = p.layout == "bshd" || (p.layout == "packed" && !is_input);
  if (is_dO ? p.layout == "bhsd" : is_bshd) {
    at.strides = {S * H * D, D, H * D};
  } else if (p.layout == "packed" && !is_dO) {
    const int64_t row = (p.Hq + 2 * int64_t(p.Hkv)) * D;
    at.strides = {S * row, D, row};
  } else if (p.layout == "padded") {
    at.strides = nested(D + pad, pad, pad);
  } else if (p.layout == "zero" && is_input) {
    at.strides = {0, 0, tensor == Tensor::dO ? 0 : D};
  } else if (p.layout == "reversed" && is_input) {
    at.strides = {H * S * D, -S * D, -D};
  } else if (p.layout == "far") {
    at.strides = nested(D, 0, far);
    together = 2;
  } else if (p.layout == "far_heads") {
    at.strides = nested(D, far, 0);
    together = 1;
  } else if (p.layout == "far_rows") {
    at.strides = nested(D + far, 0, 0);
    together = 0;
  }

  const struct {
    int64_t size, stride;
  } dims[] = {{S, at.strides.row}, {H, at.strides.head}, {batches_of(p, tensor), at.strides.batch}};
  at.span = at.piece_span = D;
  for (int i = 0; i < 3; i++) {
    if (dims[i].size == 0) {  // no element
      at.first = 0;
      at.span = 0;
      at.piece_rows = 0;
      at.piece_span = 0;
      break;
    }
    const int64_t steps = dims[i].size - 1, stride = dims[i].stride;
    at.span += steps * std::abs(stride);
    if (stride < 0) at.first -= steps * stride;
    if (i < together) {
      at.piece_rows *= dims[i].size;
      at.piece_span += steps * std::abs(stride);
    }
  }
  return at;
}

constexpr int64_t MARGIN = GUARD / 2;  // elements around a piece that hold 0xff like the guards

// Guards, margins of pieces and gaps between rows are filled with 0xff bytes.
class PlacedTensor : public DeviceTensor {
 public:
  const Placement at;

  PlacedTensor(const Problem& p, Tensor tensor, const Placement& at)
      : DeviceTensor(p, tensor, size_t(2 * MARGIN + at.span)), at(at), D(width_of(p, tensor)) {
    strides = at.strides;
    H_ = of_query(tensor) ? p.Hq : p.Hkv;
    S_ = of_query(tensor) ? p.Sq : p.Sk;
    rows_ = at.piece_rows ? int64_t(rows_of(p, tensor)) : 0;
  }

  void* first() const override { return data() + (MARGIN + at.first) * int64_t(element_bytes); }
  void poison() override { write({}); }
  void write(const Bits& x) override {  // empty: only poison
    for (int64_t row = 0; row < end(); row += step()) {
      Bits piece(piece_elements(), POISON);
      if (!x.empty()) {
        for_each_row(row, [&](int64_t r, int64_t at) { std::copy_n(&x[r * D], D, &piece[at]); });
      }
      store_elements(piece, start(row));
    }
  }
  Bits read(string& trouble) const override {
    Bits x(rows_ * D);
    for (int64_t row = 0; row < end(); row += step()) {
      Bits piece = fetch_elements(piece_elements(), start(row));
      for_each_row(row, [&](int64_t r, int64_t at) { std::copy_n(&piece[at], D, &x[r * D]); });
      // Everything except the rows must be unchanged.
      for_each_row(row, [&](int64_t, int64_t at) { std::fill_n(&piece[at], D, POISON); });
      expect_poison(piece, trouble);
    }
    expect_guards(trouble);
    return x;
  }

 private:
  // Pieces are identified by their first row. A tensor without elements has one piece, which
  // consists of margins.
  int64_t step() const { return std::max<int64_t>(1, at.piece_rows); }
  int64_t end() const { return std::max<int64_t>(1, rows_); }
  size_t piece_elements() const { return size_t(at.piece_span + 2 * MARGIN); }
  // Offset of the margin before the piece of this first row, which is its lowest row unless there is one piece.
  int64_t start(int64_t row) const {
    return at.piece_rows == rows_ ? 0 : place_of(row);
  }
  int64_t place_of(int64_t row) const {
    const int64_t b = row / S_ / H_, h = row / S_ % H_, s = row % S_;
    return at.first + b * strides.batch + h * strides.head + s * strides.row;
  }
  // Calls visit(index of a row in [B,H,S], offset of its first element in the piece) on all cores.
  template <class Visit> void for_each_row(int64_t piece, const Visit& visit) const {
    constexpr int64_t block = 2048;
    reference::parallel_for(size_t((at.piece_rows + block - 1) / block), [&](size_t n) {
      const int64_t first = piece + int64_t(n) * block;
      const int64_t last = std::min(first + block, piece + at.piece_rows);
      for (int64_t row = first; row < last; row++) {
        visit(row, MARGIN + place_of(row) - start(piece));
      }
    });
  }
  void expect_poison(const Bits& piece, string& trouble) const {
    const auto written = [&](uint16_t bits) { return bits != POISON; };
    const auto at = std::find_if(piece.begin(), piece.end(), written);
    if (at == piece.end() || !trouble.empty()) return;
    const bool before = at - piece.begin() < MARGIN, after = piece.end() - at <= MARGIN;
    trouble = string("the kernel wrote ") +
              (before  ? "before "
               : after ? "after "
                       : "between the rows of ") +
              name;
  }

  const int64_t D;
  const uint16_t POISON = element_bytes == 1 ? 0xff : 0xffff;
  int64_t H_, S_, rows_;
};

// ---- strided auxiliary inputs ----

// An auxiliary input of SdpaParams: rows of `run` elements.
struct StridedInput {
  const char** data;
  size_t element_bytes;
  int64_t run;
  struct {
    int64_t size;
    int64_t* stride;  // null: there is no such dimension
  } dims[3];          // row, head, batch
};

// SdpaParams::Sk exceeds the problem's Sk if the page table is wider.
vector<StridedInput> strided_inputs(const Problem& problem, SdpaParams& p) {
  const auto data = [](auto& pointer) { return reinterpret_cast<const char**>(&pointer); };
  vector<StridedInput> inputs;
  if (p.page_size && !has_clock) {  // a GPU has no room for so many pages
    for (const bool is_v : {false, true}) {
      Strides& s = is_v ? p.v : p.k;
      inputs.push_back({is_v ? data(p.V) : data(p.K), element_bytes(line.input), is_v ? p.Dv : p.D,
                        {{p.page_size, &s.row}, {p.Hkv, &s.head}, {p.pages, &s.batch}}});
    }
  }
  if (p.bias) {
    Strides& s = p.bias_strides;
    inputs.push_back({data(p.bias), size_t(bias_bytes()), p.bias_keys ? p.bias_keys : std::min(p.Sk, problem.Sk),
                      {{has_key_bias() ? 1 : p.Sq, &s.row}, {has_key_bias() ? 1 : p.Hq, &s.head}, {p.B, &s.batch}}});
  }
  if (p.key_mask) inputs.push_back({data(p.key_mask), 1, p.Sk, {{1, nullptr}, {1, nullptr}, {p.B, &p.key_mask_stride}}});
  const auto add_factors = [&](Descale& d, int heads) {
    if (d.factor) inputs.push_back({data(d.factor), sizeof(float), 1, {{1, nullptr}, {heads, &d.head}, {p.B, &d.batch}}});
  };
  add_factors(p.q_descale, p.Hq);
  add_factors(p.k_descale, p.Hkv);
  add_factors(p.v_descale, p.Hkv);
  return inputs;
}

// The parameters with auxiliary inputs and page table rows as far apart as the batches, heads or
// rows of Q. The copies live until the next launch, before which the caller waits.
SdpaParams spread_inputs(const Problem& problem, SdpaParams p) {
  static vector<std::unique_ptr<Guarded>> copies;
  copies.clear();
  const int64_t far = int64_t(1) << 31;
  const bool is_far[] = {p.q.row >= far, p.q.head >= far, p.q.batch >= far};
  if (!is_far[0] && !is_far[1] && !is_far[2]) return p;
  const auto copy = [](char* to, const char* from, size_t bytes) {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice), "spreading an input");
  };
  for (const StridedInput& x : strided_inputs(problem, p)) {
    int64_t extent = (x.run + 15) / 16 * 16, old_strides[3] = {}, strides[3] = {}, sizes[3];
    for (int i = 0; i < 3; i++) {
      const auto& dim = x.dims[i];
      if (dim.stride) old_strides[i] = *dim.stride;
      sizes[i] = old_strides[i] != 0 ? dim.size : 1;  // 0: all share it
      if (old_strides[i] != 0) strides[i] = extent + (is_far[i] ? far : 0);
      if (dim.stride) *dim.stride = strides[i];
      extent = strides[i] * (sizes[i] - 1) + extent;
    }
    copies.emplace_back(new Guarded("a spread input", size_t(extent) * x.element_bytes));
    char* const to = copies.back()->data();
    for (int64_t n = 0; n < sizes[0] * sizes[1] * sizes[2]; n++) {
      const int64_t at[] = {n % sizes[0], n / sizes[0] % sizes[1], n / sizes[0] / sizes[1]};
      int64_t old_offset = 0, offset = 0;
      for (int i = 0; i < 3; i++) {
        old_offset += at[i] * old_strides[i];
        offset += at[i] * strides[i];
      }
      copy(to + offset * x.element_bytes, *x.data + old_offset * x.element_bytes, x.run * x.element_bytes);
    }
    *x.data = to;
  }
  if (p.page_table && is_far[2] && !has_clock) {  // page_stride is an int: offsets pass 2^31 from the third sequence on
    const int64_t stride = INT_MAX, old_stride = p.page_stride;
    copies.emplace_back(new Guarded("a spread page table", size_t((p.B - 1) * stride + old_stride) * sizeof(int)));
    int* const to = copies.back()->data<int>();
    for (int b = 0; b < p.B; b++) {
      copy(reinterpret_cast<char*>(to + b * stride), reinterpret_cast<const char*>(p.page_table + b * old_stride), old_stride * sizeof(int));
    }
    p.page_table = to;
    p.page_stride = int(stride);
  }
  return p;
}

std::unique_ptr<DeviceTensor> make_placed_tensor(const Problem& p, Tensor tensor) {
  const Placement at = place(p, tensor);
  if (double(at.span) * sizeof(uint16_t) > 1e15) throw TooLarge{{"no GPU has so much memory"}};
  return std::make_unique<PlacedTensor>(p, tensor, at);
}

}  // namespace
}  // namespace SDPA_NAMESPACE
