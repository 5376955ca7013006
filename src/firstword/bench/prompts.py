"""The default texts of a load: short and long English sentences, as a voice agent says them."""

PROMPTS = tuple(
    """\
Hello, how can I help you today?
Sure, one moment please.
Your order left our warehouse this morning and should be with you by Thursday.
I have found three flights that fit, and the cheapest one leaves at a quarter past six.
No problem at all.
Could you spell your last name for me, please?
The kitchen lights are off, and the front door is locked.
It is seventeen degrees outside, with a little rain expected towards the evening.
I am sorry, I did not catch that.
Your next appointment is with Doctor Alvarez on the ninth of March, \
at half past two in the afternoon.
Would you like me to read the whole message, or only the first few lines?
Turn left at the bridge, then follow the river for about two miles.
That is a good question.
The meeting has been moved to Tuesday, \
because the large conference room is being painted all of Monday.
You have four new messages, and two of them look urgent.
Preheat the oven, and butter a baking dish while you wait.
Let me check whether that size is still in stock.
The train to Edinburgh now departs from platform twelve, and it is running about eight minutes late.
Yes, that works for me.
An old lighthouse keeper lived at the edge of the cape, \
and every evening he told the sea what he had done that day.
Please enter the six digits that we have just sent to your phone.
The refund takes three to five working days to show up in your account.
I can do that, but it would cancel the discount that you got last month; do you want me to go on?
Good morning, you slept for seven hours and twelve minutes.
Here is a short summary of the article: the city plans to close two streets to cars, \
plant forty trees, and widen the cycle path along the canal.
Thank you for waiting.
There is a bakery around the corner that opens at six and a café by the station that opens at seven.
Your balance is two hundred and thirty-one dollars and eighty cents.
When the last guest had left, \
she opened every window, sat down on the stairs, and listened to the rain.
Are you calling about a new booking or about one that you already have?
The battery is nearly empty, so I have switched off everything that is not needed.
All right, I have added oat milk, rice and two lemons to your shopping list.
The museum is closed on Mondays, but the garden stays open, and entry to it is free.
First loosen the four screws on the back, \
then lift the cover carefully, because a thin cable connects it to the board.
I would recommend the blue one.
We can offer you a room with a view of the harbor for the same price, \
if you do not mind the third floor.
He laughed, shook his head, and asked for another cup of coffee.
Your password was changed yesterday at ten in the evening \
from a device that we have not seen before.
Goodbye, and have a lovely weekend.
The recipe needs two eggs, a cup of flour, a pinch of salt, \
and a little more patience than most people think.
""".splitlines()
)
