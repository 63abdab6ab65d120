from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0017_clocks_of_workers")]

    operations = [
        migrations.AddField(
            model_name="jobfailure",
            name="log",
            field=models.TextField(
                blank=True,
                db_default="",
                default="",
                help_text="The last lines that were logged while it ran.",
                verbose_name="log",
            ),
        ),
    ]
