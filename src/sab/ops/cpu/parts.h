// A list of all parts of one kind. Outside a part is known by its name, inside by its index in the list.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

template <typename... Part> struct Parts {
    static bool has(int64_t index) { return index >= 0 && index < static_cast<int64_t>(sizeof...(Part)); }
    // All names in their order, separated by spaces.
    static std::string names() {
        std::string all;
        ((all += all.empty() ? "" : " ", all += Part::name), ...);
        return all;
    }
};

// Calls `use` with the part of this index. No index outside the list gets here: `check` in loop.cpp refuses it.
template <typename Part, typename... Rest, typename Use>
auto visit(Parts<Part, Rest...>, int64_t index, const Use &use) {
    if (index == 0) return use(Part{});
    if constexpr (sizeof...(Rest) > 0)
        return visit(Parts<Rest...>{}, index - 1, use);
    else
        std::abort();
}
